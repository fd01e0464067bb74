"""Chat templates, a conversation, and a tokenizer that is made in no time."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: reasoning is shown in the turns after the last user message only.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].strip() %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "1 + 1?"}
TALK = [
    USER,
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "and + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with the template QWEN2."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["It is 4.\n\nuser and assistant system <think>\n\n</think>\n\n1 + 1?"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = QWEN2
    return fast
