"""Models of published dimensions with random bf16 weights, and a tokenizer of words: random_model.py 4b FOLDER"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
_LARGE: dict[str, Any] = dict(num_hidden_layers=36, num_attention_heads=32)
_TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
_HYBRID: dict[str, Any] = dict(
    hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "0.5b": {**_SMALL, "vocab_size": 32000},
    "0.6b": _SMALL,
    "1.7b": {**_SMALL, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {**_LARGE, "hidden_size": 2560, "intermediate_size": 9728},
    "8b": {**_LARGE, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    # Mixtures of experts: the layers of Qwen3-30B-A3B, which has 48 of them.
    "tiny-moe": {
        **_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": False,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    },
    "30b-a3b-4-layers": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    # Hybrid mixtures: three layers with a gated delta net and one with attention, of 48 and 40.
    "tiny-hybrid": {
        **_HYBRID, "model_type": "qwen3_5_moe_text", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "vocab_size": 512, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "next-80b-a3b-4-layers": {
        **_HYBRID, "model_type": "qwen3_next", "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10,
    },
    "35b-a3b-4-layers": {
        **_HYBRID, "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
    },
}  # fmt: skip
_COMMON = dict(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True)
EOS = 1


def dimensions(size: str) -> dict[str, Any]:
    """The fields of a Qwen3 of `size`, or of another model of its family."""
    return {**_COMMON, **SIZES[size]}


def make_model(folder: Path, size: str, *, device: str = "cpu", seed: int = 0, tilt: float = 0.0) -> Path:
    """Make a random Qwen3 (or Qwen3-MoE) and its tokenizer in `folder`, unless they are there; the weights are made on
    `device`.

    Args:
        tilt: unless 0, the first value of the embeddings in the lower half of the vocabulary, and less that in the
            upper half: what a reward that prefers one of them can be learned by in few steps.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").exists():
        return folder
    fields = dimensions(size)
    kind = fields.pop("model_type", "qwen3_moe" if "num_experts" in fields else "qwen3")
    config = AutoConfig.for_model(kind, max_position_embeddings=4096, eos_token_id=EOS, pad_token_id=0, **fields)
    config.dtype = torch.bfloat16
    if "linear_num_key_heads" in fields:
        torch.manual_seed(seed)
        with torch.device(device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        save_tokenizer(folder, config.vocab_size)
        return folder
    config.architectures = [{"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]]
    with torch.device("meta"):
        shapes = dict(_one_by_one(AutoModelForCausalLM.from_config(config).state_dict()))
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator(device).manual_seed(seed)

    def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return (made.fill_(1) if "norm" in name else made.normal_(0, 0.02, generator=generator)).cpu()

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight(name, shape) for name, shape in shapes.items()}
    if tilt:
        firsts = weights["model.embed_tokens.weight"][:, 0]
        firsts[: len(firsts) // 2], firsts[len(firsts) // 2 :] = tilt, -tilt
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder, config.vocab_size)
    config.save_pretrained(folder)  # the last: it says that the model is whole
    return folder


def _one_by_one(weights: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as checkpoints have them: transformers holds all experts of a layer in one tensor."""
    for name, tensor in weights.items():
        layer, experts, part = name.rpartition(".experts.")
        if not experts:
            yield name, tuple(tensor.shape)
            continue
        num, *shape = tensor.shape
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        shape[0] //= len(parts)
        for i in range(num):
            yield from ((f"{layer}.experts.{i}.{p}.weight", tuple(shape)) for p in parts)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token: <pad>, <eos>, <unk>, w3, w4, ... (special tokens are found within other words, too)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, **{f"w{i}": i for i in range(3, vocab_size)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)


def prompt(num_tokens: int, vocab_size: int, seed: int) -> str:
    """A text of so many tokens."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(3, vocab_size)}" for _ in range(num_tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tilt", type=float, default=0.0)
    options = parser.parse_args()
    make_model(options.folder, options.size, device=options.device, seed=options.seed, tilt=options.tilt)
