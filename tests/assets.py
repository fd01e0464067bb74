"""A tiny Qwen3 checkpoint with a character tokenizer, and tiny data, made on the fly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*=?., abcdefghijklmnopqrstuvwxyz\\{}:"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*specials, *CHARACTERS, "\n"])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_checkpoint(
    path: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    layers: int = 2,
    max_len: int = 128,
    head_dim: int = 16,
    hidden_size: int = 64,
    vocab_size: int | None = None,
) -> Path:
    """A random Qwen3 whose vocabulary is single characters; `vocab_size` may be more than there are."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size or len(vocab),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=tied,
        eos_token_id=vocab["<|im_end|>"],
        pad_token_id=vocab["<|endoftext|>"],
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def with_head(folder: Path, model: Any) -> None:
    """Let the folder of a model hold its output layer, also where that is its embedding, and config.json tie them."""
    from safetensors.torch import load_file, save_file

    weights = {**load_file(folder / "model.safetensors"), "lm_head.weight": model.lm_head.weight.detach().clone()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))


def make_prompts(path: Path, num: int, *, seed: int = 0) -> Path:
    """`a+b=?` in the seeds' jsonl format."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for i in range(num):
            a, b = rng.randrange(50), rng.randrange(50)
            row = {
                "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
                "label": str(a + b),
                "metadata": {"row": i},
            }
            file.write(json.dumps(row) + "\n")
    return path


def make_conversations(path: Path, num: int, *, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(num):
            a, b = rng.randrange(50), rng.randrange(50)
            messages = [
                {"role": "user", "content": f"{a}+{b}=?"},
                {"role": "assistant", "content": f"\\boxed{{{a + b}}}", "step_loss_mask": 1},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_pairs(path: Path, num: int, *, seed: int = 0) -> Path:
    """Preference pairs, rows by turns as messages, as whole conversations, and as text: the right sum is preferred."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for i in range(num):
            a, b = rng.randrange(50), rng.randrange(50)
            prompt = [{"role": "user", "content": f"{a}+{b}=?"}]
            chosen, rejected = (
                [{"role": "assistant", "content": f"\\boxed{{{a + b + wrong}}}" + " ok" * (i % 4 * wrong)}]
                for wrong in (0, 1)
            )
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            if i % 3 == 1:
                row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
            if i % 3 == 2:
                row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1}, {a}"}
            file.write(json.dumps(row) + "\n")
    return path
