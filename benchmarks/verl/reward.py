"""The reward of `benchmarks/gpu_grpo.py` as verl calls it; verl loads this file by its path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    return sum(map(ord, solution_str[:64])) % 97 / 97
