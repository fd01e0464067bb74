"""A ragged rollout of six responses in two optimizer steps, and random numbers for its tokens."""

from __future__ import annotations

import random

import torch

TOLERANCE = {"abs": 1e-9, "rel": 1e-6}
LENGTHS = [3, 1, 4, 2, 5, 2]
STEPS = [0, 0, 0, 1, 1, 1]
IDS = ["a", "a", None, "b", None, "c"]  # the first two are siblings
MASK = [1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1]  # sample 3, an execution of its own, is masked out


def numbers(n: int, seed: int, scale: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, scale) for _ in range(n)]


def tensor(values: list[float], grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)
