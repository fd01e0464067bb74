"""Counts of a run, for its checkpoints and its summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.controller.round import TrainedBatch
from instep.controller.round_metrics import evaluation_summary
from instep.controller.sync.probe import Difference
from instep.controller.sync.weight_sync import SyncResult
from instep.observability.versions import versions


@dataclass
class Totals:
    """The sums of a run.

    Attributes:
        num_steps, num_critic_steps: optimizer steps, with those of earlier sessions.
        evaluations: the metrics of each evaluation and its rollout_id, with those of earlier sessions.
        num_tokens: tokens of this session's training batches, with their prompts.
        num_rounds: the finished rounds of this session.
        last_sync: the result of the last sync of this session.
    """

    num_steps: int = 0
    num_critic_steps: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    last_sync: SyncResult | None = None
    _started: float = field(default_factory=time.monotonic)
    _largest_diff: Difference = Difference(0.0, 0.0, 0.0)  # of all syncs
    _gap_of_sync: dict[str, float] = field(default_factory=dict)  # until `take_gap` returns it
    _gpu_peak: float = 0.0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of a checkpoint."""
        self.num_steps, self.num_critic_steps = int(state["num_steps"]), int(state.get("num_critic_steps", 0))
        self.evaluations = state["evaluations"]

    def state(self) -> dict[str, Any]:
        """Return the part that a checkpoint stores."""
        return {name: getattr(self, name) for name in ("num_steps", "num_critic_steps", "evaluations")}

    def add_sync(self, result: SyncResult) -> None:
        self.last_sync, self._gap_of_sync = result, result.gap()
        self._largest_diff = Difference(*map(max, self._largest_diff, result.proven.last))

    def add_training(self, batch: TrainedBatch) -> None:
        self.num_steps += len(batch.steps)
        self.num_critic_steps += batch.num_critic_steps
        self.num_tokens += len(batch.batch.tokens)

    def take_gap(self) -> dict[str, float]:
        """Return the gap of the last sync, once; then an empty dict."""
        found, self._gap_of_sync = self._gap_of_sync, {}
        return found

    def gpu_peak(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return `perf/gpu_peak_bytes`, the maximum over all rounds so far, if the trainer has a GPU."""
        peaks = (value for name, value in metrics.items() if name.endswith("/trainer_peak_bytes"))
        self._gpu_peak = max(self._gpu_peak, *peaks, 0.0)
        return {"perf/gpu_peak_bytes": self._gpu_peak} if self._gpu_peak else {}

    def summary(self, peak_pss_bytes: float, ledger: Mapping[str, int], next_rollout: int) -> dict[str, Any]:
        """Return summary.json without the metrics of the last step; `next_rollout` comes after the last rollout."""
        summary: dict[str, Any] = {
            "num_rollouts": self.num_rounds,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "wall_seconds": time.monotonic() - self._started,
            "peak_pss_bytes": peak_pss_bytes,
            "ledger": ledger,
            "versions": versions(),
            **evaluation_summary(self.evaluations, next_rollout),
        }
        if self.last_sync is not None:
            summary["sync_probe_rms_diff"] = self._largest_diff.rms
            summary["sync_probe_mean_abs_diff"] = self._largest_diff.mean
            summary["sync_probe_max_abs_diff"] = self._largest_diff.largest
            summary["sync_probe_tolerance"] = self.last_sync.proven.tolerance
        return summary
