"""A small command line that parses, and what it needs on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.engines.flags import engine_words
from instep.errors import ConfigError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def make_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go into `folder`, with a data file and something that looks like a checkpoint."""
    monkeypatch.chdir(folder)
    Path("data.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    Path("model/model.safetensors").write_bytes(b"0")
    return folder


BASE = {
    "--hf-checkpoint": "model",
    "--prompt-data": "data.jsonl",
    "--label-key": "label",
    "--rollout-batch-size": "4",
    "--num-rollout": "3",
    "--rm-type": "math",
    "--actor-num-gpus-per-node": "1",
}


def argv(extra: str = "", without: str = "") -> list[str]:
    base = [word for flag, value in BASE.items() if flag not in without.split() for word in (flag, value)]
    return base + extra.split()


def refusal(extra: str = "", without: str = "", command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv(extra, without), command)
    return str(caught.value)


def vllm_words(args: Any) -> list[str]:
    """What the command line gives `vllm serve` by `--vllm-*`."""
    return [word for words in engine_words(args).values() for word in words]


def keywords(words: list[str]) -> dict[str, Any]:
    """The keywords of `instep.train` for a command line whose flags have one value or none."""
    flags: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word[2:].replace("-", "_")] = True if following.startswith("--") else following
    return flags
