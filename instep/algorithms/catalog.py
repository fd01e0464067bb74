"""The algorithms, one record each: all information on an algorithm for flags, rules, documents and the plan of a run.

This module imports no torch. The keys of a record lead to its formulas: `Estimator.name` in `advantages.ESTIMATORS`,
`Loss.name` in `losses.policy.FORMS`, `Loss.type` in `training.losses.LOSSES`. A new algorithm is one record here. A new
formula is also one function, and one line in its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instep.arguments.settings import AlgorithmSettings


@dataclass(frozen=True)
class Estimator:
    """How the advantages of tokens are computed from the rewards of a rollout.

    Attributes:
        name: the key of its functions in `advantages.ESTIMATORS`.
        compared: what a reward is compared with, as text for the documentation.
        compares_group: whether rewards are compared within their group, so a group needs two executions.
        comparison_optional: whether the comparison may be disabled (`--disable-rewards-normalization`).
        divides_by_std: whether the comparison divides by the group's std (unless `--disable-grpo-std-normalization`).
        kl_on_tokens: whether `--kl-coef` acts on each token; otherwise it acts on a sample's reward, before the
            comparison.
        whitens: whether advantages are whitened over the rollout even without `--normalize-advantages`.
        discounts: whether the advantage of a token is a sum over later tokens, so `--gamma` acts.
        has_critic: whether it reads the values of a critic, so `--lambd` acts.
        takes_success_rates: whether rewards must be success rates, so no penalty or KL may be subtracted.
    """

    name: str
    compared: str
    compares_group: bool = False
    comparison_optional: bool = False
    divides_by_std: bool = False
    kl_on_tokens: bool = False
    whitens: bool = False
    discounts: bool = False
    has_critic: bool = False
    takes_success_rates: bool = False


@dataclass(frozen=True)
class Loss:
    """The loss that an algorithm minimizes.

    Attributes:
        name: for a policy loss its form, a key of `losses.policy.FORMS`; other losses have one form.
        of_token: the loss of a token (of a pair), as text for the documentation.
        type: the value of `--loss-type`, a key of `training.losses.LOSSES`.
        bounds: what `--eps-clip` and `--eps-clip-high` bound: the ratio (`--eps-clip-c` acts, too), a weight, whose
            lower bound may be 0, the divergence from the sampling policy (`--eps-clip-c` bounds the ratio), or nothing
            (a policy loss then has a smooth gate, `--sapo-tau-pos`).
        of_response: whether its ratio belongs to a whole response, so `--gspo-gradient` acts.
        reads_reference: whether it reads the reference's log-probs even without a KL.
        of_pairs: whether it is a loss of pairs; the samples of a pair must share a micro-batch.
    """

    name: str
    of_token: str
    type: str = "policy_loss"
    bounds: Literal["ratio", "weight", "divergence", "nothing"] = "nothing"
    of_response: bool = False
    reads_reference: bool = False
    of_pairs: bool = False


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of `instep train`, or an algorithm without sampling, which has its own command.

    Attributes:
        name: the value of `--advantage-estimator`; for an algorithm without sampling, the command.
        title: its name in papers.
        paper: the arXiv number; empty without a paper.
        estimator: how advantages are computed; None without rewards and advantages.
        defaults: the defaults that it changes, by argument name. That of `eps_clip_high` is used only if `--eps-clip`
            is not given either.
    """

    name: str
    title: str
    paper: str
    estimator: Estimator | None
    loss: Loss
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_rewards(self) -> bool:
        return self.estimator is not None

    @property
    def has_critic(self) -> bool:
        return self.estimator is not None and self.estimator.has_critic


_GRPO = Estimator(
    "grpo",
    "with its group's mean, over the group's std",
    compares_group=True,
    comparison_optional=True,
    divides_by_std=True,
)
_DR_GRPO = Estimator("dr_grpo", "with its group's mean", compares_group=True)
_RLOO = Estimator("rloo", "with the mean of the others of its group", compares_group=True)
_MAX_RL = Estimator("max_rl", "with its group's mean, over that mean", compares_group=True, takes_success_rates=True)
_REINFORCE_PLUS_PLUS = Estimator(
    "reinforce_plus_plus", "with all tokens of the rollout", kl_on_tokens=True, whitens=True, discounts=True
)
_REINFORCE_PLUS_PLUS_BASELINE = Estimator(
    "reinforce_plus_plus_baseline",
    "with its group's mean, then with all tokens of the rollout",
    compares_group=True,
    kl_on_tokens=True,
    whitens=True,
)
_GAE = Estimator("gae", "with a critic's value, token by token", kl_on_tokens=True, discounts=True, has_critic=True)

_PPO_CLIP = Loss("ppo_clip", "PPO's clip", bounds="ratio")
_GSPO = Loss("gspo", "PPO's clip of the response's ratio", bounds="ratio", of_response=True)
_CISPO = Loss("cispo", "log-prob times a bounded weight", bounds="weight")
_SAPO = Loss("sapo", "a smooth gate on the ratio")
_DPPO_TV = Loss("dppo_tv", "log-prob times the ratio, masked beyond a total variation", bounds="divergence")
_DPPO_KL = Loss("dppo_kl", "log-prob times the ratio, masked beyond a KL", bounds="divergence")
_SFT = Loss("sft", "-log-prob", "sft_loss")
_DPO = Loss("dpo", "-log sigmoid of the pair's margin", "dpo_loss", reads_reference=True, of_pairs=True)

# The KL to the reference that alarms and remedies recommend; it pulls the policy back to the reference. As a loss, k1
# (the default of --kl-loss-type) has a gradient of expectation 0.
KL_IN_LOSS = "--use-kl-loss --kl-loss-coef 1e-3 --kl-loss-type low_var_kl"

# The values of `--advantage-estimator`; the first is the default.
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", "GRPO", "2402.03300", _GRPO, _PPO_CLIP),
        Algorithm("gspo", "GSPO", "2507.18071", _GRPO, _GSPO, defaults={"eps_clip": 3e-4, "eps_clip_high": 4e-4}),
        Algorithm("cispo", "CISPO", "2506.13585", _GRPO, _CISPO, defaults={"eps_clip": 1.0, "eps_clip_high": 4.0}),
        Algorithm("sapo", "SAPO", "2511.20347", _GRPO, _SAPO),
        Algorithm(
            "dppo_tv", "DPPO", "2602.04879", _GRPO, _DPPO_TV, defaults={"eps_clip": 0.15, "use_rollout_logprobs": True}
        ),
        Algorithm(
            "dppo_kl", "DPPO", "2602.04879", _GRPO, _DPPO_KL, defaults={"eps_clip": 0.05, "use_rollout_logprobs": True}
        ),
        Algorithm("dr_grpo", "Dr. GRPO", "2503.20783", _DR_GRPO, _PPO_CLIP),
        Algorithm("rloo", "RLOO", "2402.14740", _RLOO, _PPO_CLIP),
        Algorithm("max_rl", "MaxRL", "2602.02710", _MAX_RL, _PPO_CLIP),
        Algorithm("reinforce_plus_plus", "REINFORCE++", "2501.03262", _REINFORCE_PLUS_PLUS, _PPO_CLIP),
        Algorithm(
            "reinforce_plus_plus_baseline",
            "REINFORCE++ with baseline",
            "2501.03262",
            _REINFORCE_PLUS_PLUS_BASELINE,
            _PPO_CLIP,
        ),
        Algorithm("ppo", "PPO", "1707.06347", _GAE, _PPO_CLIP),
    )
}
DEFAULT_ROLLOUT = "instep.rollout.vllm_rollout.generate_rollout"
SFT_ROLLOUT = "instep.rollout.sft_rollout.generate_rollout"
DPO_ROLLOUT = "instep.rollout.dpo_rollout.generate_rollout"
# The commands of reinforcement learning: rounds in sequence, or rollouts during the training.
ONLINE = ("train", "train-async")
# The commands without sampling, because the data hold the responses: no engine, no reward, no critic.
OFFLINE: dict[str, Algorithm] = {
    "sft": Algorithm("sft", "SFT", "", None, _SFT, {"n_samples_per_prompt": 1, "rollout_function_path": SFT_ROLLOUT}),
    "dpo": Algorithm(
        "dpo",
        "DPO",
        "2305.18290",
        None,
        _DPO,
        {"n_samples_per_prompt": 1, "rollout_function_path": DPO_ROLLOUT, "input_key": "prompt"},
    ),
}


def algorithm_of(args: AlgorithmSettings) -> Algorithm:
    """Return the algorithm of a run: by its command if it samples nothing, otherwise by `--advantage-estimator`."""
    return OFFLINE.get(args.command) or ALGORITHMS[args.advantage_estimator]


def uses_reference(args: AlgorithmSettings) -> bool:
    """Return whether the workers of the actor score with the reference model."""
    algorithm = algorithm_of(args)
    kl = algorithm.has_rewards and bool(args.use_kl_loss or args.kl_coef)
    return (kl or algorithm.loss.reads_reference) and args.ref_served_model is None


def names_where(holds: Callable[[Estimator, Loss], bool]) -> tuple[str, ...]:
    """Return the values of `--advantage-estimator` for which `holds(estimator, loss)` is true, in the catalog's
    order."""
    return tuple(a.name for a in ALGORITHMS.values() if a.estimator is not None and holds(a.estimator, a.loss))


def listed(names: Sequence[str], last: str = "or") -> str:
    """Return the names as text: `a, b or c`."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
