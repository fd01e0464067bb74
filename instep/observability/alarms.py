"""Alarms for trouble in a run, from the metrics of its steps alone.

Each alarm is a pure function of the steps so far, the newest last. It returns a text when it is raised, "" when it is
not, and None when its metrics are missing. `docs/metrics.md` lists the alarms. A step is a rollout and the training on
it. The end of a solved task raises no alarm: its entropy is low, the rewards within a group are equal, and the reward
does not change (`_solved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from instep.algorithms.catalog import KL_IN_LOSS

START = 3  # the median of so many first steps counts as the start
WINDOW = 3  # the mean of so many steps is compared with a limit
RECENT = 20  # the steps for the usual value of a spike, and for a stuck reward
SPIKE = 10.0  # gradient norm, relative to the median of the recent steps
JUMP = 3.0  # response length, relative to the median of the recent steps
MASKED = 2  # steps without any training
STUCK = 1e-3  # spread of the reward
TOP = 0.1  # of the rewards' spread: a solved task may be this far from its best reward
RISING = 0.05  # of the rewards' spread: a reward that rises grows by more over the recent steps
_KEEP = 200  # steps in memory, besides the first ones

_WEIGHT = "train/loss_weight"
_REJECTED = {"train/rs_clipfrac": "--use-rs", "train/opsm_clipfrac": "--use-opsm"}  # shares of tokens left out

Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Limits:
    """The values of the flags `--alarm-*`."""

    entropy_fraction: float = 0.02
    gap: float = 0.1
    truncated_ratio: float = 0.5
    zero_std_ratio: float = 0.95
    effective_sample_ratio: float = 0.3

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Limits:
        return cls(**{name: args[f"alarm_{name}"] for name in cls.__dataclass_fields__ if f"alarm_{name}" in args})


def entropy_collapse(steps: Steps, limits: Limits) -> str | None:
    values = _values(steps, "train/entropy")
    if not values or not limits.entropy_fraction:
        return None
    start = median(values[:START])
    if len(values) <= START or values[-1] >= limits.entropy_fraction * start or _solved(steps) or _rises(steps):
        return ""
    rewards = _values(steps, "rollout/reward_mean")
    gained = f", and the reward does not rise ({rewards[-1]:.3g})" if rewards else ""
    return (
        f"train/entropy is {values[-1]:.3g}, it was {start:.3g} at the start{gained}; try a lower --lr, "
        f"--entropy-coef, --eps-clip-high above --eps-clip, or a KL to the reference ({KL_IN_LOSS})"
    )


def gap_drift(steps: Steps, limits: Limits) -> str | None:
    found = None
    for name in ("train/log_prob_gap_mean", "train/engine_kl"):
        values = _values(steps, name)
        if not values or not limits.gap:
            continue
        found = found or ""
        start, now = median(values[:START]), abs(fmean(values[-WINDOW:]))  # the mean: few tokens make large jumps
        if now > limits.gap or (len(values) > START and now > max(limits.gap / 10, 10 * abs(start))):
            found = (
                f"{name} is {now:.3g} nats, it was {start:.3g} at the start: trainer and engine disagree about "
                "the same tokens; try `instep samples RUN --worst gap`, the same dtype in both, --use-tis"
            )
    return found


def off_policy(steps: Steps, limits: Limits) -> str | None:
    values = _values(steps, "train/effective_sample_ratio")
    if not values or not limits.effective_sample_ratio:
        return None
    if len(values) < START or (now := fmean(values[-START:])) >= limits.effective_sample_ratio:
        return ""
    return (
        f"train/effective_sample_ratio is {now:.2g}: the trained policy differs too much from the one that sampled, "
        f"and few tokens count; try a smaller --max-staleness, a lower --lr, --use-tis"
    )


def truncation(steps: Steps, limits: Limits) -> str | None:
    return _above(
        steps,
        "rollout/truncated_ratio",
        limits.truncated_ratio,
        "responses are cut off; try a larger --rollout-max-response-len, a shorter task or a length penalty",
    )


def zero_variance_groups(steps: Steps, limits: Limits) -> str | None:
    if _solved(steps):
        return ""
    return _above(
        steps,
        "rollout/zero_std_groups_ratio",
        limits.zero_std_ratio,
        "groups have equal rewards and teach nothing: the task is far too easy or hard, or its reward is wrong; "
        "try other data, more --n-samples-per-prompt, --dynamic-sampling-filter-path",
    )


def grad_norm_spike(steps: Steps, limits: Limits) -> str | None:
    if not steps or "train/grad_norm" not in steps[-1]:
        return None
    now, before = steps[-1]["train/grad_norm"], _values(steps[:-1], "train/grad_norm")[-RECENT:]
    what = "try a lower --lr or --clip-grad, and look at the samples (`instep samples RUN --worst length`)"
    if not abs(now) < float("inf"):
        return f"train/grad_norm is {now}: the step was skipped; {what}"
    usual = median(before) if len(before) >= 5 else 0.0
    at_start = max(_values(steps[:START], "train/grad_norm"), default=0.0)  # a small gradient may grow again
    raised = usual > 0 and now > max(SPIKE * usual, at_start)
    return f"train/grad_norm is {now:.3g}, usual were {usual:.3g}; {what}" if raised else ""


def reward_stuck(steps: Steps, limits: Limits) -> str | None:
    values = _values(steps, "rollout/reward_mean")
    if not values:
        return None
    recent = values[-RECENT:]
    if len(recent) < RECENT or max(recent) - min(recent) > STUCK or _solved(steps):
        return ""
    return (
        f"rollout/reward_mean is {values[-1]:.3g} for {RECENT} steps; look at `instep samples RUN`: is the answer in "
        "the form that the reward looks for, is --label-key right, is the task too easy or too hard"
    )


def length_explosion(steps: Steps, limits: Limits) -> str | None:
    values = _values(steps, "rollout/response_length_mean")
    if not values:
        return None
    before = values[:-1][-RECENT:]
    if len(before) < 5 or values[-1] <= JUMP * median(before):
        return ""
    return (
        f"rollout/response_length_mean is {values[-1]:.0f}, usual were {median(before):.0f}; try a lower --lr, and "
        "`instep samples RUN --worst length`: a response that repeats itself misses its end token"
    )


def nothing_trained(steps: Steps, limits: Limits) -> str | None:
    """Report steps whose tokens are all masked, or whose gradient is 0 although rewards differ."""
    recent = steps[-MASKED:]
    if not steps or not any(name in steps[-1] for name in (_WEIGHT, "train/grad_norm", *_REJECTED)):
        return None
    why = ""
    if all(step.get(_WEIGHT) == 0 for step in recent):
        why = f"{_WEIGHT} is 0, as every token is masked; look at loss_mask and remove_sample of your functions"
    for name, flag in _REJECTED.items():
        if all(step.get(name, 0.0) >= 1 for step in recent):
            why = f"{name} is 1, as {flag} leaves out every token; look at train/log_prob_gap_mean, or widen its bounds"
    still = [step.get("train/grad_norm") == 0 and step.get("rollout/zero_std_groups_ratio", 0.0) < 1 for step in recent]
    if not why and all(still) and not _solved(steps):
        why = "train/grad_norm is 0 although rewards differ; look at the masks, the advantages and --lr of your run"
    return f"nothing was trained in the last {len(recent)} steps: {why}" if why and len(recent) == MASKED else ""


_ALL = (entropy_collapse, gap_drift, off_policy, truncation, zero_variance_groups, grad_norm_spike, reward_stuck)
ALARMS: dict[str, Callable[[Steps, Limits], str | None]] = {
    alarm.__name__: alarm for alarm in (*_ALL, length_explosion, nothing_trained)
}


class AlarmWatch:
    """The alarms of a run, step by step.

    Attributes:
        first: the step at which each alarm was first raised, by its name.
    """

    def __init__(self, limits: Limits, rows: Sequence[Mapping[str, Any]] = ()):
        """Take the limits, and the steps of earlier sessions as rows of metrics.jsonl (null for NaN)."""
        self._limits = limits
        self._steps: list[Mapping[str, float]] = [{k: v for k, v in row.items() if v is not None} for row in rows]
        self._trained = not all(map(_idle, self._steps))
        self.first = first_raised(rows)

    def check(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return `alarm/<name>` (0 or 1) of each alarm with metrics, and the texts of newly raised alarms."""
        self._steps.append(metrics)
        self._trained |= not _idle(self._steps[-1])
        del self._steps[START:-_KEEP]
        out, new = {}, []
        for name, alarm in ALARMS.items():
            text = alarm(self._steps, self._limits)
            if text is None:
                continue
            out[f"alarm/{name}"] = float(bool(text))
            if text and name not in self.first:
                self.first[name] = step
                new.append(f"alarm {name}: {text}")
        return out, new

    def at_end(self) -> list[str]:
        """Return lines for the end: nothing was trained, or all was cut off in a run too short for the alarm."""
        cut, lines = _values(self._steps, "rollout/truncated_ratio"), []
        if len(cut) < WINDOW and min(cut, default=0) >= 1 and (text := truncation(self._steps * WINDOW, self._limits)):
            self.first.setdefault("truncation", len(self._steps) - 1)
            lines.append(f"alarm truncation: {text}")
        if self._steps and not self._trained:
            masked = all(step.get(_WEIGHT) == 0 for step in self._steps)
            even = all(step.get("rollout/zero_std_groups_ratio") == 1 for step in self._steps)
            why = "every group had equal rewards" if even else "train/grad_norm was 0"
            why = "every token was masked" if masked else why
            lines.append(f"no step has trained anything: {why}")
        return lines


def first_raised(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the step at which each alarm was first raised, by its name, from rows of metrics.jsonl."""
    first: dict[str, int] = {}
    for row in rows:
        for name in ALARMS:
            if row.get(f"alarm/{name}") == 1:
                first.setdefault(name, int(row["step"]))
    return first


def advice(rows: Sequence[Mapping[str, Any]], limits: Limits) -> list[tuple[int, str, str]]:
    """Return step, name and text of each alarm of a run as it was first raised, from the rows of its steps."""
    out = []
    for name, step in first_raised(rows).items():
        seen = [row for row in rows if row["step"] <= step]
        seen[START:] = seen[START:][-_KEEP:]
        steps = [{k: float("nan") if v is None else v for k, v in row.items()} for row in seen]
        out.append((step, name, ALARMS[name](steps, limits) or ""))
    return sorted(out)


def describe(first: Mapping[str, int]) -> str:
    """Return a text for tables: `truncation (rollout 3)`, or "none"."""
    return ", ".join(f"{name} (rollout {step})" for name, step in first.items()) or "none"


def _idle(step: Mapping[str, float]) -> bool:
    return step.get(_WEIGHT) == 0 or step.get("train/grad_norm") == 0


def _solved(steps: Steps) -> bool:
    """Return whether the mean reward of the last steps is within `TOP` of the spread from the best reward."""
    rewards, best = _values(steps, "rollout/reward_mean"), max(_values(steps, "rollout/reward_max"), default=None)
    return best is not None and 0 < TOP * _spread(steps) >= best - fmean(rewards[-WINDOW:])


def _rises(steps: Steps) -> bool:
    """Return whether the mean reward of the later half of the recent steps is above that of the earlier half."""
    recent = _values(steps, "rollout/reward_mean")[-RECENT:]
    half = len(recent) // 2
    return half > 0 and fmean(recent[half:]) - fmean(recent[:half]) > RISING * _spread(steps)


def _spread(steps: Steps) -> float:
    """Return the spread of rewards: the standard deviation at the start, or the gain since then if that is larger.

    Extreme samples do not count: a rare penalty must not make all other rewards look equal.
    """
    means, best = _values(steps, "rollout/reward_mean"), _values(steps, "rollout/reward_max")
    stds = _values(steps, "rollout/reward_std")[:START]
    gained = max(best) - min(means) if best and means else 0.0
    return max(median(stds) if stds else 0.0, gained)


def _above(steps: Steps, name: str, bound: float, text: str) -> str | None:
    values = _values(steps, name)
    if not values or bound >= 1:
        return None
    mean = fmean(values[-WINDOW:])
    return f"{mean:.0%} of the {text}" if len(values) >= WINDOW and mean > bound else ""


def _values(steps: Steps, name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    return [v for step in steps if (v := step.get(name)) is not None and abs(v) < float("inf")]
