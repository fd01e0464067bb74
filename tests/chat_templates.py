"""Chat templates with the structures of published families, and random conversations for them.

They are short, and none is a copy: each has what makes masks of its family hard.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# `thought` and `answer` of an assistant's message, from its own key or from tags in its content
_THINK = (
    "{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] "
    "if '</think>' in m.content else '') %}{% set answer = m.content.split('</think>')[-1] %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
_TOOL_AS_USER = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Template:
    """A structure.

    Attributes:
        extends: whether no turn is ever written otherwise when others follow it.
        has: what conversations may have: `system`, `tools`, `thoughts`.
    """

    text: str
    extends: bool
    has: frozenset[str] = frozenset({"system", "tools", "thoughts"})


_CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _TOOL_AS_USER + "{% elif m.role == 'system' %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3 = (
    _LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}" + _THINK + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ answer.lstrip('\n') }}{% else %}{{ answer }}{% endif %}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _TOOL_AS_USER + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
TEMPLATES = {
    # A system message by default, tools in it, answers of tools as the user's.
    "qwen2.5": Template(
        "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'Be kind.' }}"
        + _TOOLS
        + "<|im_end|>\n"
        + _CHATML,
        True,
    ),
    # Reasoning is dropped before the last user's message, and an empty one shown in the last turn.
    "qwen3": Template(_QWEN3 + "{% endif %}", False),
    "qwen3-no-thinking": Template(_QWEN3 + "<think>\n\n</think>\n\n{% endif %}", False, frozenset({"system"})),
    # The generation prompt opens the reasoning.
    "qwen3-thinking": Template(
        _LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}" + _THINK + "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}{{ answer.strip() }}"
        + _CALLS
        + "<|im_end|>\n{% elif m.role == 'tool' %}"
        + _TOOL_AS_USER
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        False,
    ),
    # Headers, stripped contents, a token of the beginning, answers of tools in a role of their own.
    "llama3": Template(
        "<|bos|>{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
        True,
    ),
    # The system's message in the first of the user's, the roles `user` and `model`, in turn.
    "gemma": Template(
        _ALTERNATE.replace("messages %}", "messages if m.role != 'system' %}")
        + "<|bos|>{% for m in messages %}{% if m.role != 'system' %}"
        "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content | trim }}<|/turn|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>model\n{% endif %}",
        True,
        frozenset({"system"}),
    ),
    # No roles, a blank before answers, the system's message within the first instruction.
    "llama2": Template(
        _ALTERNATE.replace("messages %}", "messages if m.role != 'system' %}")
        + "{% for m in messages %}{% if m.role == 'user' %}<|bos|>[INST] "
        "{% if messages[0].role == 'system' and loop.index0 == 1 %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n"
        "{% endif %}{{ m.content.strip() }} [/INST]{% elif m.role == 'assistant' %} {{ m.content.strip() }} <|eos|>"
        "{% endif %}{% endfor %}",
        True,
        frozenset({"system"}),
    ),
    # The tools move with the last user's message.
    "mistral": Template(
        _LAST_USER + "<|bos|>{% for m in messages %}{% if m.role == 'user' %}"
        "{% if loop.index0 == ns.last and tools %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}<|eos|>"
        "{% elif m.role == 'tool' %}[RESULTS] {{ m.content }}[/RESULTS]"
        "{% elif m.role == 'assistant' %} {{ m.content }}<|eos|>{% endif %}{% endfor %}",
        False,
        frozenset({"tools"}),
    ),
    # Reasoning is dropped from all turns that others follow; the end token of the last turn is another.
    "gpt-oss": Template(
        "{% for m in messages %}{% if m.role == 'assistant' %}" + _THINK + "<|start|>assistant"
        "{% if loop.last and thought %}<|channel|>analysis<|message|>{{ thought }}<|end|><|start|>assistant{% endif %}"
        "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|channel|>final<|message|>{{ answer }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        False,
    ),
    # Nothing ends a turn; answers of tools in one turn; reasoning after the last user's message only.
    "glm": Template(
        "[gMASK]<sop>"
        + _LAST_USER
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + _THINK
        + "<|assistant|>\n<think>{{ thought.strip() if loop.index0 > ns.last else '' }}</think>\n{{ answer.strip() }}"
        + _CALLS
        + "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n"
        "<tool_response>{{ m.content }}</tool_response>"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        False,
    ),
    # A text ends with a token of the end, unless a turn is to be generated.
    "phi": Template(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        False,
        frozenset({"system"}),
    ),
    # An answer of a tool stands within the turn that called it.
    "inside": Template(
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>"
        "{% for t in messages if t.tool_call_id == c.id %}<result>{{ t.content }}</result>{% endfor %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        False,
    ),
    # What is far away counts: only the last three turns show their reasoning, which no window can tell.
    "far": Template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + _THINK
        + "{% if thought and loop.revindex < 8 %}<think>{{ thought }}</think>{% endif %}{{ answer }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        False,
        frozenset({"system", "thoughts"}),
    ),
    # Messages are counted, which windows get wrong, while every text extends the one before.
    "counting": Template(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }}\n{% endif %}",
        True,
        frozenset({"system"}),
    ),
}
SPECIALS = (
    "<|im_start|> <|im_end|> <|bos|> <|header|> <|/header|> <|eot|> <|turn|> <|/turn|> <|eos|> <|start|> <|end|> "
    "<|channel|> <|message|> <|call|> <|return|> <|assistant|> <|user|> <|system|> <|observation|> <|endoftext|>"
).split()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
_CONTENTS = ["It is 2.", "so 4", "\n\nhi", " hi ", "hi\n", "h\u00e9 \u4e2d", "", "<tool_call>", "user", "1 + 1?"]


def conversation(rng: random.Random, template: Template, num_exchanges: int) -> list[dict[str, Any]]:
    """A random conversation that the template takes."""
    out: list[dict[str, Any]] = []
    if "system" in template.has and rng.random() < 0.5:
        out.append({"role": "system", "content": "Answer."})
    for number in range(num_exchanges):
        out.append({"role": "user", "content": rng.choice(_CONTENTS) or "?"})
        calls = rng.choice([0, 0, 1, 2, 4]) if "tools" in template.has else 0
        for call in range(calls):
            function = {"name": "add", "arguments": {"a": call}}
            named = {"id": f"{number}.{call}", "type": "function", "function": function}
            out.append({**_said(rng, template, ""), "tool_calls": [named]})
            for _ in range(rng.choice([1, 1, 2])):
                out.append({"role": "tool", "content": rng.choice(_CONTENTS), "tool_call_id": named["id"]})
        out.append(_said(rng, template, rng.choice(_CONTENTS)))
    if rng.random() < 0.2:
        out.append({"role": "user", "content": "bye"})
    return out


def _said(rng: random.Random, template: Template, content: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if "thoughts" in template.has and rng.random() < 0.6:
        if rng.random() < 0.5:
            message["reasoning_content"] = "let me see"
        else:
            message["content"] = f"<think>\nlet me see\n</think>\n\n{content}"
    if rng.random() < 0.15:
        message["step_loss_mask"] = 0
    return message
