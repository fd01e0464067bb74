"""The probe of a proof: the texts that trainer and engine score, and the allowed difference of their log-probs.

The rounding error of a log-prob grows with its size `l`. So each difference is divided by max(1, |l|), and the root
mean square over the probe decides, not a single token. The effect of rounding is measured: the trainer scores the
probe twice, the second time with half of its embeddings one unit in the last place smaller. On ten families and on
a real model, right engines differed by 0.4 to 1.8 times as much (docs/weight-sync.md, tests/distributed/margins.json).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch

from instep.engines.engine import Engine
from instep.errors import EngineError
from instep.rollout.outputs import flatten
from instep.types import Group, TokenBatch

NUM_TEXTS, TEXT_TOKENS = 2, 96
PROMPT_TOKENS = 16  # before a response


@dataclass(frozen=True)
class Text:
    """Tokens to score; `made` says for the second to the last token whether an engine generated it."""

    tokens: tuple[int, ...]
    made: tuple[bool, ...]


class Difference(NamedTuple):
    """The difference between the log-probs of two sides.

    Attributes:
        rms: root mean square of the differences, each divided by max(1, |log-prob of the first side|).
        mean, largest: of the absolute differences, in nats.
    """

    rms: float
    mean: float
    largest: float


def difference(expected: Sequence[float], scores: Sequence[float], counted: Sequence[bool] = (True,)) -> Difference:
    """Return the difference of the worst replica; infinite if a score is not a number.

    Args:
        scores: of all replicas, one after the other.
        counted: which tokens count for mean and largest.
    """
    size = len(expected)
    found = [_difference(expected, scores[i : i + size], counted) for i in range(0, len(scores), size)]
    return max(found)


def _difference(expected: Sequence[float], scores: Sequence[float], counted: Sequence[bool]) -> Difference:
    gaps = [abs(x - y) for x, y in zip(expected, scores, strict=True)]
    gaps = [gap if gap == gap else math.inf for gap in gaps]
    squares = [(gap / max(1.0, abs(x))) ** 2 for gap, x in zip(gaps, expected, strict=True)]
    nats = [gap for gap, counts in zip(gaps, cycle(counted), strict=False) if counts]
    return Difference(math.sqrt(sum(squares) / len(squares)), sum(nats) / max(1, len(nats)), max(nats, default=0.0))


class Probe:
    """The texts that a run scores in its proofs.

    They begin as random tokens. Once an engine serves, it samples them. Later each sync replaces the oldest text by
    one of the last rollout, so that the policy wrote them.

    Args:
        max_len: the most tokens of a sequence.
        start: the token after which an engine samples.
    """

    def __init__(self, *, vocab_size: int, max_len: int, start: int = 0):
        length = max(4, min(TEXT_TOKENS, max_len - 1))
        self._vocab_size, self._length, self._start = vocab_size, length, start
        generator = torch.Generator().manual_seed(0)
        random = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for _ in range(NUM_TEXTS)]
        self.texts = [Text(tuple(tokens), (True,) * (length - 1)) for tokens in random]
        self._sampled = False
        self._next: Text | None = None

    @property
    def num_scores(self) -> int:
        """The number of tokens that one replica scores."""
        return sum(len(text.made) for text in self.texts)

    @property
    def made(self) -> list[bool]:
        """Whether an engine generated the token, for each score."""
        return [made for text in self.texts for made in text.made]

    def sample(self, engines: Sequence[Engine], timeout: float) -> None:
        """Let an engine write the first texts, once; keep the random texts if no engine can."""
        if self._sampled:
            return
        self._sampled = True
        for engine in engines:
            with contextlib.suppress(EngineError):  # the next session reports its fault
                made = engine.sample([self._start], self._length - 1, num=NUM_TEXTS, timeout=timeout)
                whole = all(len(tokens) == self._length - 1 for tokens in made)
                if whole and all(0 <= token < self._vocab_size for tokens in made for token in tokens):
                    self.texts = [Text((self._start, *tokens), (True,) * len(tokens)) for tokens in made]
                return

    def offer(self, groups: Sequence[Group]) -> None:
        """Make the next text from responses: one per group with some of its prompt, up to the length of the others."""
        tokens, made = list[int](), list[bool]()
        for sample in (next(flatten(group)) for group in groups):
            mask = sample.loss_mask or [1] * sample.response_length
            given = min(PROMPT_TOKENS, len(sample.tokens) - len(mask))
            size = min(given + len(mask), self._length - len(tokens))
            tokens += sample.tokens[len(sample.tokens) - size :]
            made += map(bool, ([0] * given + list(mask))[given + len(mask) - size :])
            if len(tokens) == self._length:
                break
        if len(tokens) == self._length and any(made[1:]) and max(tokens) < self._vocab_size:
            self._next = Text(tuple(tokens), tuple(made[1:]))

    def turn(self) -> None:
        """Replace the oldest text by the last offered text."""
        if self._next is not None:
            self.texts, self._next = [*self.texts[1:], self._next], None

    def batch(self) -> TokenBatch:
        """Return the texts as a batch for the trainer."""
        lengths = torch.tensor([len(text.tokens) for text in self.texts])
        return TokenBatch(
            tokens=torch.tensor([token for text in self.texts for token in text.tokens]),
            total_lengths=lengths,
            response_lengths=lengths - 1,
            sample_columns={"temperature": torch.ones(len(self.texts))},
        )

    def by_text(self, scores: Sequence[float]) -> dict[tuple[int, Text], list[float]]:
        """Split the scores of an engine by replica and text."""
        out, start = dict[tuple[int, Text], list[float]](), 0
        for replica in range(len(scores) // self.num_scores):
            for text in self.texts:
                out[replica, text] = list(scores[start : start + len(text.made)])
                start += len(text.made)
        return out


def start_token(config: dict[str, Any]) -> int:
    """Return the token after which an engine samples freely: the one that begins a text, or ends one, or 0."""
    for name in ("bos_token_id", "eos_token_id"):
        token = config.get(name)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    return 0
