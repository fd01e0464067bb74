"""The metrics of a round, from the results of workers and rollout functions. docs/metrics.md lists their names."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from statistics import fmean
from typing import Any

from instep.algorithms.catalog import algorithm_of
from instep.algorithms.losses.value import explained_variance
from instep.arguments.algorithm.distillation import NO_REWARD
from instep.arguments.settings import HookSettings, LoggingSettings
from instep.observability.metrics import pass_rates, rollout_metrics
from instep.rollout.outputs import flatten
from instep.rollout.request_gate import gate
from instep.system.hooks import Hook
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, TokenBatch, reward_of

# Metrics that are not averaged over the steps of a rollout: the gap to the engine belongs to the first step. Later the
# policy is no longer the one that sampled.
_FIRST = (
    *("log_prob_gap_mean", "log_prob_gap_max", "engine_kl", "log_prob_gap_coverage", "log_prob_gap_fresh"),
    "effective_sample_ratio",
)


def metrics_of_rollout(
    hook_args: HookSettings, rollout_id: int, output: RolloutFnTrainOutput, seconds: float
) -> dict[str, float]:
    """Return `rollout/*` and the rollout function's metrics; nothing if the user's log function logged them."""
    groups = output.samples
    if path := hook_args.custom_rollout_log_function_path:
        samples = [s for group in groups for s in flatten(group)]
        log = Hook("--custom-rollout-log-function-path", path)
        if log.call(rollout_id, hook_args, samples, output.metrics, seconds, where=f"rollout {rollout_id}"):
            return {}
    out = {**rollout_metrics(groups, reward_key=hook_args.reward_key), **output.metrics}
    if hook_args.log_passrate:
        rewarded = ((s, reward_of(s, hook_args.reward_key)) for g in groups for s in g if s.reward is not None)
        out |= {f"rollout/{name}": value for name, value in pass_rates(rewarded).items()}
    if not algorithm_of(hook_args).has_rewards or hook_args.custom_rm_path == NO_REWARD:
        out = {name: value for name, value in out.items() if not re.search("reward|zero_std|pass@", name)}
    return out


def training_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return `train/*` of one rollout from the metrics of its optimizer steps; nothing without steps."""
    if not steps:
        return {}
    names = dict.fromkeys(name for step in steps for name in step)
    out = {name: fmean(step[name] for step in steps if name in step) for name in names}
    out |= {name: steps[0][name] for name in _FIRST if name in steps[0]}
    out["lr"] = steps[-1]["lr"]
    out["skipped_steps"] = sum(step["skipped_steps"] for step in steps)
    return {f"train/{name}": value for name, value in out.items()}


def critic_metrics(steps: list[dict[str, float]], batch: TokenBatch) -> dict[str, float]:
    """Return `critic/*` of one rollout, from its optimizer steps and the values behind its advantages."""
    out = {
        "value_loss": fmean(step["loss"] for step in steps),
        "value_clipfrac": fmean(step["value_clipfrac"] for step in steps),
        "grad_norm": fmean(step["grad_norm"] for step in steps),
        "lr": steps[-1]["lr"],
        "skipped_steps": sum(step["skipped_steps"] for step in steps),
    }
    trained = batch.token_columns["loss_weights"] > 0
    values, returns = (batch.token_columns[name][trained] for name in ("values", "returns"))
    if values.numel():
        out |= {"values_mean": float(values.double().mean()), "returns_mean": float(returns.double().mean())}
    if (explained := explained_variance(values, returns)) is not None:
        out["explained_variance"] = explained
    return {f"critic/{name}": value for name, value in out.items()}


def speed_metrics(
    seconds: dict[str, float], num_response_tokens: int | None, num_tokens: int, early_train: float = 0.0
) -> dict[str, float]:
    """Return `perf/*` of one round from the seconds of its phases; `num_response_tokens` is None without engines.

    Args:
        early_train: the training seconds that fell into the rollout.
    """
    out = {f"perf/{name}_seconds": s for name, s in seconds.items()}
    out["perf/step_seconds"] = sum(s for name, s in seconds.items() if name != "eval")
    if seconds.get("rollout") and num_response_tokens is not None:
        out["perf/rollout_tokens_per_second"] = num_response_tokens / seconds["rollout"]
    if seconds.get("train"):
        out["perf/train_tokens_per_second"] = num_tokens / (seconds["train"] + early_train)
    return out


class IdleClock:
    """Measure the share of time in which each side is idle."""

    def __init__(self) -> None:
        self._at, self._idle = time.monotonic(), gate().idle_seconds()

    def take(self, train_seconds: float, *, engines: bool) -> dict[str, float]:
        """Return the shares since the last call: without training, and, with engines, without a request to them."""
        at, idle = self._at, self._idle
        self._at, self._idle = time.monotonic(), gate().idle_seconds()
        seconds = max(self._at - at, 1e-9)
        shares = {"trainer": 1 - train_seconds / seconds}
        if engines:
            shares["engine"] = (self._idle - idle) / seconds
        return {f"perf/{side}_idle_ratio": min(1.0, max(0.0, share)) for side, share in shares.items()}


def staleness_metrics(batch: TokenBatch, version: int) -> dict[str, float]:
    """Return how many versions older than `version` the trained tokens are; nothing if no version is known."""
    counts: Counter[int] = Counter()
    masks = batch.token_columns["loss_mask"].split(batch.response_lengths.tolist())
    for mask, spans in zip(masks, batch.sample_columns["weight_versions"], strict=True):
        for span in spans:
            if span.version.isdigit():
                counts[max(0, version - int(span.version))] += int(mask[span.start : span.end].sum())
    if not (total := sum(counts.values())):
        return {}
    mean = sum(age * n for age, n in counts.items()) / total
    out = {"async/staleness_mean": mean, "async/staleness_max": float(max(a for a, n in counts.items() if n))}
    return out | {f"async/staleness_ratio/{age}": n / total for age, n in sorted(counts.items())}


def logs_evaluation(hook_args: HookSettings, rollout_id: int, output: RolloutFnEvalOutput) -> bool:
    """Return whether the user's log function has logged an evaluation; then nothing else logs it."""
    if not (path := hook_args.custom_eval_rollout_log_function_path):
        return False
    log, where = Hook("--custom-eval-rollout-log-function-path", path), f"evaluation before rollout {rollout_id}"
    return bool(log.call(rollout_id, hook_args, output.data, output.metrics, where=where))


def evaluation_metrics(output: RolloutFnEvalOutput, *, pass_rate: bool = False) -> dict[str, float]:
    """Return `eval/*` of every data set; with `pass_rate` also pass@k, if there are samples to count."""
    out = dict(output.metrics)
    for name, result in output.data.items():
        out[f"eval/{name}/reward_mean"] = fmean(result["rewards"])
        if result["truncated"]:
            out[f"eval/{name}/truncated_ratio"] = fmean(map(bool, result["truncated"]))
        if result["samples"]:
            out[f"eval/{name}/response_length_mean"] = fmean(s.response_length for s in result["samples"])
        if pass_rate and len(result["samples"]) == len(result["rewards"]):
            rates = pass_rates(zip(result["samples"], map(float, result["rewards"]), strict=True))
            out |= {f"eval/{name}/{rate}": value for rate, value in rates.items()}
    return out


def evaluation_summary(evaluations: list[dict[str, float]], rollout_id: int) -> dict[str, Any]:
    """Return the evaluations for summary.json: the first data set's reward before and after, and all metrics.

    Args:
        rollout_id: the next round. "after" is an evaluation before this round, "before" is one before round 0.
    """
    if not evaluations:
        return {}
    first, last = evaluations[0], evaluations[-1]
    name = next((k for k in last if k.endswith("/reward_mean")), "")
    ends = (("eval_reward_before", first, 0), ("eval_reward_after", last, rollout_id))
    found = {key: row[name] for key, row, wanted in ends if row["rollout_id"] == wanted and name in row}
    return {**found, "evaluations": evaluations}


def trackio_settings(args: LoggingSettings) -> dict[str, str | None] | None:
    """Return the options of a run of Trackio, or None without Trackio."""
    if not args.use_trackio:
        return None
    named = {"project": args.trackio_project, "run_name": args.trackio_run_name}
    return {**named, "server_url": args.trackio_server_url}


def wandb_settings(args: LoggingSettings, run_id: str | None) -> dict[str, Any] | None:
    """Return the options of a W&B run, or None without W&B. Key and host are passed only in the environment."""
    if not args.use_wandb:
        return None
    for name, value in (("WANDB_BASE_URL", args.wandb_host), ("WANDB_API_KEY", args.wandb_key)):
        if value:
            os.environ[name] = value
    sys.argv = [word.replace(args.wandb_key, "***") if args.wandb_key else word for word in sys.argv]  # W&B saves it
    options = {name: getattr(args, f"wandb_{name}") for name in ("project", "group", "mode", "team", "dir", "run_id")}
    return {**options, "run_id": options["run_id"] or run_id}
