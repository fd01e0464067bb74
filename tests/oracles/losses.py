"""Losses and corrections as their papers write them: slow, scalar, plain Python; and ragged data to run them on.

Everything is a function of one sample's lists. `frozen` stands for what a paper puts under a stop-gradient: the
log-probs at the point where the gradient is taken, which a finite difference must not move.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Response:
    """One trained response; siblings of a fan-out have one `execution`."""

    step: int
    execution: str
    advantage: float
    mask: list[int]
    old: list[float]
    engine: list[float]
    ref: list[float]
    current: list[float] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]


def responses(seed: int, *, spread: float = 0.3) -> list[Response]:
    """Two steps of three executions or more: siblings, masked tool tokens, a fully masked response, single tokens."""
    rng = random.Random(seed)
    plan = [(0, "a"), (0, "a"), (0, "b"), (0, "c"), (1, "d"), (1, "e"), (1, "e"), (1, "e"), (1, "f")]
    out = []
    for i, (step, execution) in enumerate(plan):
        length = 1 if i == 2 else rng.randrange(2, 9)
        current = [-abs(rng.gauss(0, 1.5)) - 0.05 for _ in range(length)]
        old, engine, ref = ([c + rng.gauss(0.02, spread) for c in current] for _ in range(3))
        engine = [min(x, -0.01) for x in engine]  # a probability
        mask = [0] * length if i == 3 else [1 if t == 0 else int(rng.random() < 0.75) for t in range(length)]
        out.append(Response(step, execution, rng.gauss(0, 1), mask, old, engine, ref, current))
    rng.shuffle(out)
    return out


Values = list[float]
TokenLoss = Callable[
    [Response, Values, Values], Values
]  # (response, log-probs, frozen log-probs) -> loss of each token


def objective(
    batch: list[Response],
    values: list[Values],
    frozen: list[Values],
    loss: TokenLoss,
    per_token: bool,
    constant: int | None = None,
):
    """Sum over optimizer steps of the mean over executions of each one's token mean (GRPO, arXiv:2402.03300, eq. 3),
    or of the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8), or of the mean over executions of each one's sum
    over a constant (Dr. GRPO, arXiv:2503.20783, listing 1)."""
    total = 0.0
    for step in sorted({r.step for r in batch}):
        of_execution: dict[str, list[float]] = {}
        for r, lp, fixed in zip(batch, values, frozen, strict=True):
            if r.step == step:
                losses = loss(r, lp, fixed)
                of_execution.setdefault(r.execution, []).extend(losses[t] for t in r.kept)
        everything = [x for xs in of_execution.values() for x in xs]
        if per_token:
            total += sum(everything) / max(len(everything), 1)
        elif constant is not None:
            total += sum(sum(xs) / constant for xs in of_execution.values()) / len(of_execution)
        else:
            total += sum(sum(xs) / max(len(xs), 1) for xs in of_execution.values()) / len(of_execution)
    return total


def slopes(function: Callable[[list[Values]], float], point: list[Values], h: float = 1e-6) -> list[Values]:
    """The gradient by central differences."""
    out = []
    for i, row in enumerate(point):
        out.append([])
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [list(x) for x in point]
                moved[i][t] += sign * h
                ends.append(function(moved))
            out[-1].append((ends[0] - ends[1]) / (2 * h))
    return out


# --- forms of the policy loss ---------------------------------------------------------------------------------------


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def scalar_ppo(lp: float, old: float, a: float, low: float, high: float, c: float | None) -> float:
    """arXiv:1707.06347, eq. 7; dual clip arXiv:1912.09729."""
    ratio = math.exp(lp - old)
    surrogate = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if c is not None and a < 0:
        surrogate = max(surrogate, c * a)
    return -surrogate


def ppo(low: float, high: float, c: float | None = None) -> TokenLoss:
    return lambda r, lp, _: [scalar_ppo(x, old, r.advantage, low, high, c) for x, old in zip(lp, r.old, strict=True)]


def gspo(low: float, high: float, c: float | None = None) -> TokenLoss:
    """arXiv:2507.18071, eq. 5: the ratio of the sequence, at each of its tokens; no stop-gradient anywhere."""

    def loss(r: Response, lp: Values, _: Values) -> Values:
        mean = sum(lp[t] - r.old[t] for t in r.kept) / max(len(r.kept), 1)
        return [scalar_ppo(mean, 0.0, r.advantage, low, high, c)] * len(lp)

    return loss


def gspo_token(low: float, high: float) -> TokenLoss:
    """arXiv:2507.18071, eq. 12: the value is the sequence's ratio, the gradient the token's."""

    def loss(r: Response, lp: Values, frozen: Values) -> Values:
        mean = sum(frozen[t] - r.old[t] for t in r.kept) / max(len(r.kept), 1)
        return [scalar_ppo(mean + x - f, 0.0, r.advantage, low, high, None) for x, f in zip(lp, frozen, strict=True)]

    return loss


def cispo(low: float, high: float) -> TokenLoss:
    """arXiv:2506.13585, eqs. 4 and 5."""

    def loss(r: Response, lp: Values, frozen: Values) -> Values:
        weights = [clip(math.exp(f - old), 1 - low, 1 + high) for f, old in zip(frozen, r.old, strict=True)]
        return [-w * r.advantage * x for w, x in zip(weights, lp, strict=True)]

    return loss


def sapo(tau_pos: float, tau_neg: float) -> TokenLoss:
    """arXiv:2511.20347: f(x) = sigmoid(tau (x - 1)) 4 / tau."""
    tau_of = {True: tau_pos, False: tau_neg}

    def loss(r: Response, lp: Values, _: Values) -> Values:
        tau = tau_of[r.advantage > 0]
        gates = [4 / tau / (1 + math.exp(-tau * (math.exp(x - old) - 1))) for x, old in zip(lp, r.old, strict=True)]
        return [-g * r.advantage for g in gates]

    return loss


def dppo(kind: str, low: float, high: float, c: float = math.inf) -> TokenLoss:
    """arXiv:2602.04879: the gradient of eq. 23 with the mask of eq. 12 and the divergences of eqs. 13 and 14."""

    def loss(r: Response, lp: Values, frozen: Values) -> Values:
        out = []
        for x, f, engine in zip(lp, frozen, r.engine, strict=True):
            pi, mu = math.exp(f), math.exp(engine)
            d = abs(mu - pi)
            if kind == "kl":
                d = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            up, down = r.advantage > 0 and pi / mu > 1 and d > high, r.advantage < 0 and pi / mu < 1 and d > low
            out.append(0.0 if up or down else -min(pi / mu, c) * r.advantage * x)
        return out

    return loss


# --- corrections ----------------------------------------------------------------------------------------------------


def decoupled_ppo(eps: float) -> TokenLoss:
    """arXiv:2110.00641, section 3: prox / behavior min(pi / prox A, clip(pi / prox) A), prox the recomputed policy."""

    def loss(r: Response, lp: Values, _: Values) -> Values:
        out = []
        for x, prox, behavior in zip(lp, r.old, r.engine, strict=True):
            ratio, a = math.exp(x) / math.exp(prox), r.advantage
            out.append(-math.exp(prox) / math.exp(behavior) * min(ratio * a, clip(ratio, 1 - eps, 1 + eps) * a))
        return out

    return loss


def level_ratios(r: Response, train: Values, level: str) -> Values:
    """exp of d_t, of sum_t d_t, of mean_t d_t, d = trainer - engine over the tokens with mask 1."""
    d = [x - e for x, e in zip(train, r.engine, strict=True)]
    total = sum(d[t] for t in r.kept)
    if level == "sequence":
        d = [total] * len(d)
    elif level == "geometric":
        d = [total / max(len(r.kept), 1)] * len(d)
    return [math.exp(clip(x, -20, 20)) for x in d]


def bounded(ratio: float, mode: str, low: float, high: float) -> float:
    if mode == "truncate":
        return min(ratio, high)
    if mode == "clip":
        return clip(ratio, low, high)
    return ratio if low <= ratio <= high else 0.0


def weighted(loss: TokenLoss, level: str, mode: str, low: float, high: float, *, recomputed: bool = True) -> TokenLoss:
    """Each token's loss times its importance weight; without recomputed log-probs the trainer's are the frozen ones."""

    def out(r: Response, lp: Values, frozen: Values) -> Values:
        ratios = level_ratios(r, r.old if recomputed else frozen, level)
        weights = [bounded(x, mode, low, high) for x in ratios]
        return [w * x for w, x in zip(weights, loss(r, lp, frozen), strict=True)]

    return out


def rejected(loss: TokenLoss, level: str, low: float, high: float, veto: float | None) -> TokenLoss:
    def out(r: Response, lp: Values, frozen: Values) -> Values:
        keep = [low <= x <= high for x in level_ratios(r, r.old, level)]
        if veto is not None and any(math.exp(r.old[t] - r.engine[t]) < veto for t in r.kept):
            keep = [False] * len(keep)
        return [x if k else 0.0 for x, k in zip(loss(r, lp, frozen), keep, strict=True)]

    return out


def sequence_masked(loss: TokenLoss, delta: float) -> TokenLoss:
    """DeepSeek-V3.2, arXiv:2512.02556: M = 0 where A < 0 and mean_t log(old / new) > delta."""

    def out(r: Response, lp: Values, frozen: Values) -> Values:
        drift = sum(r.old[t] - lp[t] for t in r.kept) / max(len(r.kept), 1)
        return [0.0 if r.advantage < 0 and drift > delta else x for x in loss(r, lp, frozen)]

    return out


# --- the rest -------------------------------------------------------------------------------------------------------


def scalar_kl(lp: float, base: float, kind: str, old: float | None = None) -> float:
    """Schulman 2020: -log r, (log r)^2 / 2, r - 1 - log r of r = base / policy."""
    d = lp - base
    value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "low_var_kl": math.exp(-d) - 1 + d}[kind]
    if old is not None:
        value *= math.exp(lp - old)
    return clip(value, -10.0, 10.0) if kind == "low_var_kl" else value


def scalar_dpo(chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, beta: float, e: float) -> float:
    """arXiv:2305.18290, eq. 7, with the labels flipped with probability e."""
    z = beta * math.log(math.exp(chosen - ref_chosen) / math.exp(rejected - ref_rejected))
    return -(1 - e) * math.log(1 / (1 + math.exp(-z))) - e * math.log(1 - 1 / (1 + math.exp(-z)))
