"""Chat templates in the documented formats of DeepSeek V3, Qwen and Mistral, and conversations that are hard to spell.

The turns of the model stand in `{% generation %}`, from which transformers makes masks of its own. A line break right
after a block tag is none in Jinja as transformers sets it up.
"""

from __future__ import annotations

import json
import random
from typing import Any

Message = dict[str, Any]


def _deepseek(word: str) -> str:
    """The name of one of DeepSeek's tokens, with a wide bar, and a low block where a blank would be."""
    return "<\uff5c" + word.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_BEGIN, DEEPSEEK_END = _deepseek("begin of sentence"), _deepseek("end of sentence")
# The model card of DeepSeek-V3.1: nothing stands between a tool's output and what the model says next.
DEEPSEEK = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{{ '\n\n## Tools\n' }}{% for t in tools %}{{ '\n### ' + t.function.name }}\n\n"
    "Parameters: {{ t.function.parameters | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}" + _deepseek("User") + "{{ m.content }}"
    "{% elif m.role == 'tool' %}" + _deepseek("tool output begin") + "{{ m.content }}" + _deepseek("tool output end")
    + "{% elif m.role == 'assistant' %}"
    "{% if messages[loop.index0 - 1].role == 'user' %}" + _deepseek("Assistant") + "{% endif %}"
    "{% generation %}{{ m.content }}{% if m.tool_calls %}" + _deepseek("tool calls begin")
    + "{% for c in m.tool_calls %}" + _deepseek("tool call begin") + "{{ c.function.name }}" + _deepseek("tool sep")
    + "{{ c.function.arguments | tojson }}" + _deepseek("tool call end") + "{% endfor %}" + _deepseek("tool calls end")
    + "{% endif %}" + DEEPSEEK_END + "{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}" + _deepseek("Assistant") + "{% endif %}"
)  # fmt: skip
# Qwen's documentation, "Function Calling": ChatML; calls as Hermes has them.
QWEN = (
    "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{{ '\n\n# Tools\n\n<tools>\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "</tools>{% endif %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral's documentation, "Tokenization", v7: the tools stand before the last user's message.
MISTRAL = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% generation %}{{ m.content.rstrip(' ') }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)

TEXTS = [
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",  # CJK
    "\U0001f469\u200d\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",  # ZWJ
    "\U0001f1ef\U0001f1f5\U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd 1\ufe0f\u20e3",  # flags, a skin, a keycap
    "cafe\u0301 a\u0300\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e19\u0e49\u0e33",  # combining marks
    "a\tb\t\tc\n\tdef f():\n\t\treturn\t1",
    "one\u2028two\u2029three\u0085four\x0bfive\x0csix",  # what Python's splitlines parts
    "first\r\nsecond\r\n\r\nthird\rfourth",
    "\n\nafter blank lines  ",
    "  two blanks before, and after\n\n",
    "\u0301begins with a mark",
    "\ufffd\u200b\u00a0\u3000\ufeff\u202eabc\u202c",  # a real U+FFFD, blanks of no width, wide ones, right to left
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \U00020000\U0010ffff\ue000",
    '{"a": "\\u4f60\\n", \'b\': [1,2]} \\boxed{4}',
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "\u67e5\u8bcd \U0001f50d",
            "parameters": {"type": "object", "properties": {"\u8a9e": {"type": "string"}}},
        },
    }
]


def conversation(rng: random.Random, num_exchanges: int, *, tools: bool) -> list[Message]:
    """A random conversation; with `tools` some turns of the model call them."""
    out: list[Message] = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.5 else []
    for _ in range(num_exchanges):
        out.append({"role": "user", "content": rng.choice(TEXTS)})
        for _ in range(rng.choice([0, 1, 2]) if tools else 0):
            calls = [call(rng.choice(TEXTS), rng) for _ in range(rng.choice([1, 2]))]
            out.append({"role": "assistant", "content": "", "tool_calls": calls})
            out += [{"role": "tool", "content": rng.choice(TEXTS), "tool_call_id": one["id"]} for one in calls]
        out.append({"role": "assistant", "content": rng.choice(TEXTS)})
    return out


def call(text: str, rng: random.Random) -> dict[str, Any]:
    """A call of a tool whose arguments hold `text`."""
    name = "".join(rng.choices("abcdefghij0123456789", k=9))
    return {"id": name, "type": "function", "function": {"name": "look_up", "arguments": {"\u8a9e": text}}}


def turn_text(name: str, message: Message) -> str:
    """What the template of the tokenizer `name` writes of a turn of the model, through its end-of-turn token."""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False), call["id"])
        for call in message.get("tool_calls", [])
    ]
    content = message["content"]
    if name == "deepseek":
        begin, between, end = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
        text = "".join(begin + function + between + arguments + end for function, arguments, _ in calls)
        text = text and _deepseek("tool calls begin") + text + _deepseek("tool calls end")
        return content + text + DEEPSEEK_END
    if name == "mistral":
        text = ", ".join(f'{{"name": "{f}", "arguments": {a}, "id": "{i}"}}' for f, a, i in calls)
        return content.rstrip(" ") + (text and f"[TOOL_CALLS][{text}]") + "</s>"
    texts = [f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a, _ in calls]
    return "\n".join([content] * bool(content) + texts) + "<|im_end|>"
