"""The functions of the advantage estimators, by the names of `catalog.Estimator`.

An estimator has two functions: `compare` changes the rewards of samples (None: no change), and `spread` computes the
advantages of tokens from them. A hook that processes the rewards replaces `compare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from instep.algorithms.advantages.groups import Compare, dr_grpo, grpo, max_rl, rloo
from instep.algorithms.advantages.tokens import gae, reinforce_plus_plus, reinforce_plus_plus_baseline
from instep.algorithms.segments import expand


@dataclass(frozen=True)
class Inputs:
    """The data from which the advantages of tokens are computed.

    Attributes:
        rewards: float64 `[num_samples]`, after the estimator's `compare`.
        loss_mask: `[num_response_tokens]`.
        response_lengths: of each sample.
        kl: `[num_response_tokens]`, old policy against reference; None without `kl_coef`.
        values: `[num_response_tokens]` of the critic; None without one.
    """

    rewards: Tensor
    loss_mask: Tensor
    response_lengths: list[int]
    kl: Tensor | None = None
    values: Tensor | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0


class Estimate(NamedTuple):
    """Advantages, and the returns that a critic learns if there is one; float64 `[num_response_tokens]` each."""

    advantages: Tensor
    returns: Tensor | None = None


class Formulas(NamedTuple):
    """The two functions of an estimator; see the module's docstring."""

    compare: Compare | None
    spread: Callable[[Inputs], Estimate]


def _same(x: Inputs) -> Estimate:
    return Estimate(expand(x.rewards, x.response_lengths))


def _reinforce_plus_plus(x: Inputs) -> Estimate:
    return Estimate(
        reinforce_plus_plus(x.rewards, x.loss_mask, x.response_lengths, kl=x.kl, kl_coef=x.kl_coef, gamma=x.gamma)
    )


def _reinforce_plus_plus_baseline(x: Inputs) -> Estimate:
    return Estimate(reinforce_plus_plus_baseline(x.rewards, x.response_lengths, kl=x.kl, kl_coef=x.kl_coef))


def _gae(x: Inputs) -> Estimate:
    if x.values is None:
        raise ValueError("ppo needs the values of a critic")
    options: dict[str, Any] = {"gamma": x.gamma, "lambd": x.lambd, "kl": x.kl, "kl_coef": x.kl_coef}
    return Estimate(*gae(x.rewards, x.values, x.loss_mask, x.response_lengths, **options))


ESTIMATORS: dict[str, Formulas] = {
    "grpo": Formulas(grpo, _same),
    "dr_grpo": Formulas(dr_grpo, _same),
    "rloo": Formulas(rloo, _same),
    "max_rl": Formulas(max_rl, _same),
    "reinforce_plus_plus": Formulas(None, _reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Formulas(dr_grpo, _reinforce_plus_plus_baseline),
    "gae": Formulas(None, _gae),
}
