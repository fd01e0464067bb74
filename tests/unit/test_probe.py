"""The texts of a probe, and what they are compared by."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from instep.controller.sync.probe import Probe, difference, start_token
from instep.controller.sync.proof import scores_alike
from instep.errors import EngineError
from instep.training.rounding import UNITS, rounded_embedding
from instep.types import Sample

LENGTH = 6  # of a text


def test_one_unlucky_token_does_not_decide() -> None:
    expected = [-1.0] * 189 + [-25.0]
    assert difference(expected, [*expected[:-1], -24.3]).rms < 3e-3
    assert difference(expected, [x - 0.1 for x in expected]).rms == pytest.approx(0.1, rel=0.01)


def test_replicas_are_compared_one_by_one() -> None:
    """An engine answers for its data-parallel replicas one after the other."""
    expected = [-1.0, -2.0]
    found = difference(expected, [-1.0, -2.0, -1.0, -3.0])
    assert (found.rms, found.mean, found.largest) == (pytest.approx(math.sqrt(0.125)), 0.5, 1.0)
    assert difference(expected, [-1.0, -2.0, -1.0, math.nan]).rms == math.inf
    assert difference(expected, [-1.0, -3.0], counted=[True, False]).largest == 0
    probe = Probe(vocab_size=50, max_len=5)
    num = probe.num_scores
    before = probe.by_text([-1.5] * num + [-1.25] * num)
    assert not scores_alike(probe.by_text([-1.0] * 2 * num), before)
    assert scores_alike(probe.by_text([-1.0] * num + [-1.25] * num), before)  # the second one has old weights
    assert not scores_alike(before, {})


class Writer:
    """An engine that writes, or cannot."""

    def __init__(self, made: list[list[int]] | None):
        self.made, self.asked = made, 0

    def sample(self, tokens: list[int], num_tokens: int, *, num: int, timeout: float) -> list[list[int]]:
        self.asked += 1
        if self.made is None:
            raise EngineError("no")
        return [text[:num_tokens] for text in self.made]


def test_an_engine_writes_the_first_texts_and_rollouts_the_later_ones() -> None:
    probe = Probe(vocab_size=50, max_len=LENGTH + 1, start=7)
    random = [text.tokens for text in probe.texts]
    broken, writer = Writer(None), Writer([[1] * 9, [2] * 9])
    probe.sample([broken, writer], 1.0)  # type: ignore[list-item]
    probe.sample([writer], 1.0)  # type: ignore[list-item]
    assert (broken.asked, writer.asked) == (1, 1)
    assert [t.tokens for t in probe.texts] == [(7, 1, 1, 1, 1, 1), (7, 2, 2, 2, 2, 2)] and random[0] != random[1]
    long = Sample(tokens=[9] * 10 + [10, 11, 12, 13], response_length=3, loss_mask=[1, 0, 1])
    probe.offer([[long], [Sample(tokens=[20, 21, 22], response_length=1)]])
    probe.turn()
    assert probe.texts[1].tokens == (9, 9, 10, 11, 12, 13) and probe.texts[1].made == (False, False, True, False, True)
    assert probe.texts[0].tokens == (7, 2, 2, 2, 2, 2)
    short = [[Sample(tokens=[20 + i, 21, 22], response_length=1)] for i in range(3)]
    probe.offer([[[short[0][0]]], *short[1:]])  # type: ignore[list-item]
    probe.turn()
    probe.turn()  # nothing new
    assert probe.texts[1].tokens == (20, 21, 22, 21, 21, 22) and probe.texts[0].tokens[0] == 9
    before = list(probe.texts)
    for useless in ([[Sample(tokens=[1, 2], response_length=1)]], [[Sample(tokens=[60] * 9, response_length=1)]]):
        probe.offer(useless)
        probe.turn()
    assert probe.texts == before
    batch = probe.batch()
    assert batch.tokens.tolist() == [*before[0].tokens, *before[1].tokens] and batch.response_lengths.tolist() == [5, 5]


@pytest.mark.parametrize(("made", "asked"), [([[1] * 9, [99] * 9], 1), (None, 1)])
def test_texts_that_the_trainer_cannot_score_are_not_taken(made: Any, asked: int) -> None:
    probe = Probe(vocab_size=50, max_len=LENGTH + 1)
    random, writer = list(probe.texts), Writer(made)
    probe.sample([writer], 1.0)  # type: ignore[list-item]
    assert probe.texts == random and writer.asked == asked


def test_a_text_begins_as_the_model_says() -> None:
    assert start_token({"bos_token_id": 2, "eos_token_id": 1}) == 2
    assert start_token({"bos_token_id": None, "eos_token_id": [5, 6]}) == 5
    assert start_token({}) == 0


# ---- what the trainer measures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_embedding_is_rounded_by_one_unit_in_the_last_place(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    embedding = torch.nn.Embedding(50, 64, dtype=dtype)
    tokens = torch.arange(50)
    plain = embedding(tokens)
    with rounded_embedding(embedding, UNITS[precision]):
        rounded = embedding(tokens)
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    steps = plain.view(bits).int() - rounded.view(bits).int()
    assert set(steps.unique().tolist()) == {0, 1} and 0.45 < steps.float().mean() < 0.55
    assert torch.equal(embedding(tokens), plain)
    with rounded_embedding(None, UNITS[precision]):  # a rank of another pipeline stage
        pass
