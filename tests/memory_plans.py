"""Plans of the memory of a trainer and vLLM on one GPU, for unit tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.random_model import dimensions
from instep.arguments.parse import parse
from instep.preflight.plan.memory import plan_memory

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
SIDE_BY_SIDE = "--no-offload-train --no-offload-rollout"
HALF = f"--vllm-kv-cache-memory-bytes {40 << 30} --recompute-granularity full "  # of a card of 80 GiB
HALF += "--rollout-max-prompt-len 1024 --rollout-max-response-len 1024"


def make_folder(parent: Path, size: str = "4b", **other: Any) -> str:
    """Return a folder with the config.json of a Qwen3 of `size`."""
    path = parent / f"{size}-{len(other)}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**QWEN3, **dimensions(size), **other}))
    return str(path)


def words(parent: Path, more: str = "", size: str = "4b") -> list[str]:
    """Return the words of a plan with trainer and vLLM on one GPU."""
    out = f"--hf-checkpoint {make_folder(parent, size)} --colocate --actor-num-gpus-per-node 1 --rollout-backend vllm "
    out += "--precision bf16 --rollout-max-prompt-len 512 --rollout-max-response-len 1536 --train-backend hf "
    return f"{out} {more}".split()


def only(words: list[str]) -> Any:
    (kind,) = plan_memory(parse(words, "plan"))
    return kind


def of(kind: Any, name: str) -> float:
    """The largest share of an item in any phase, in GB."""
    return max(max(item.gpu.values(), default=0.0) for item in kind.items if item.name == name) / 1e9
