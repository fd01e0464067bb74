"""The weights of a rank: the worker sends, compares, exports, saves and loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from instep.arguments.args import Args
from instep.checkpoints.dist_checkpoint import random_state, set_random_state
from instep.errors import CheckpointError
from instep.training.backend import TrainBackend
from instep.weights import single_copy
from instep.weights.source import WeightSource
from instep.weights.way import OF_ADAPTERS, SINGLE_COPY, Order, way_named


class WorkerWeights:
    """The worker's calls about its weights."""

    args: Args
    backend: TrainBackend
    device: torch.device
    _host: str  # reachable by other ranks and engines
    _emit: Callable[[Any], None]

    def publish(self, way: str, order: Order) -> None:
        """Send the weights as version `order.version` by `way`; the controller gets a report of each finished part."""
        way_named(way).send(self._source(way), replace(order, host=self._host, device=str(self.device)), self._emit)

    def _source(self, way: str) -> WeightSource:
        return self.backend.weight_source(adapter=way in OF_ADAPTERS)

    def weight_digests(self, way: str) -> dict[str, str]:
        """Return the digest of every tensor that `way` sends, by name; collective, empty except on emitting ranks."""
        if way == SINGLE_COPY:
            return single_copy.WAY.digests(self._source(way))
        digest = way_named(way).digest
        return {spec.name: digest(t) for spec, t in self._source(way) if t is not None}

    def unwritten_weights(self) -> list[str]:
        """Return names of the weights that differ in the trainer and in engines with shared memory; collective."""
        return single_copy.WAY.unwritten(self._source(SINGLE_COPY))

    def broken_weights(self) -> list[str]:
        """Return names of the weights that are not finite; collective, empty except on emitting ranks."""
        return [s.name for s, t in self.backend.weight_source() if t is not None and not bool(t.isfinite().all())]

    def export_hf(self, path: Path, adapter: bool = False) -> None:
        """Write a Hugging Face checkpoint, or only the adapter in peft's format (collective)."""
        from instep.checkpoints.hf_export import export_hf
        from instep.checkpoints.untrained import WithUntrained, untrained

        if adapter:
            self.backend.export_adapter(path)
        else:
            source, hf = self.backend.weight_source(), Path(self.args.hf_checkpoint)
            with untrained(hf, source.specs) as more:
                export_hf(WithUntrained(source, more), hf, path, self.args.chat_template_text)

    def load_weights(self, path: Path, fresh_head: bool = False) -> None:
        """Load only weights, from a Hugging Face checkpoint or an instep checkpoint; see `TrainBackend.load`."""
        load_weights(self.backend, path, fresh_head)

    def save(self, path: Path) -> dict[str, str]:
        """Write model, optimizer (unless --no-save-optim) and random state into the folder `path`.

        Returns:
            The digests of the files of this rank, by name; see `Saver.finish`.
        """
        rank, num_ranks = self.backend.parallel.rank, self.backend.parallel.world_size
        try:
            self.backend.save(path)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            torch.save(random_state(), path / f"rng_{rank}.pt")
            return self.backend.saver.finish(path, rank, num_ranks, self.args.train_timeout)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            raise _cannot_write(path, error) from error

    def load(self, path: Path, optimizer: bool) -> None:
        """Read what `save` wrote; without `optimizer`, only the weights."""
        self.backend.load(path, optimizer=optimizer)
        if optimizer and (rng := path / f"rng_{self.backend.parallel.rank}.pt").exists():
            set_random_state(rng)


def load_weights(model: TrainBackend, path: Path, fresh_head: bool = False) -> None:
    if (path / "config.json").exists():
        model.load_hf(path)
    else:
        model.load(path, optimizer=False, fresh_head=fresh_head)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(str(error), where=str(path), remedy="free space or fix permissions")
