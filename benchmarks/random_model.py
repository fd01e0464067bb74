"""Models of published dimensions with random bf16 weights, and a tokenizer of words: random_model.py 4b FOLDER"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
_LARGE: dict[str, Any] = dict(num_hidden_layers=36, num_attention_heads=32)
_TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "0.5b": {**_SMALL, "vocab_size": 32000},
    "0.6b": _SMALL,
    "1.7b": {**_SMALL, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {**_LARGE, "hidden_size": 2560, "intermediate_size": 9728},
    "8b": {**_LARGE, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
_COMMON = dict(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True)
EOS = 1


def dimensions(size: str) -> dict[str, Any]:
    """The fields of a Qwen3 of `size`."""
    return {**_COMMON, **SIZES[size]}


def make_model(folder: Path, size: str, *, device: str = "cpu", seed: int = 0) -> Path:
    """Make a random Qwen3 and its tokenizer in `folder`, unless they are there; the weights are made on `device`."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return folder
    config = Qwen3Config(max_position_embeddings=4096, eos_token_id=EOS, pad_token_id=0, **dimensions(size))
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Qwen3ForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator(device).manual_seed(seed)

    def weight(name: str, shape: torch.Size) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return (made.fill_(1) if "norm" in name else made.normal_(0, 0.02, generator=generator)).cpu()

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder, config.vocab_size)
    config.save_pretrained(folder)  # the last: it says that the model is whole
    return folder


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
    options = parser.parse_args()
    make_model(options.folder, options.size, device=options.device, seed=options.seed)
