"""What a rank records of a profiled step: its calls, and with torch's profiler also operators and CUDA kernels."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from instep.system import spans
from instep.system.spans import Span
from instep.training.backend import Frozen, Role, TrainBackend

WORKER_CALLS = (
    "log_probs begin_step train publish score weight_digests unwritten_weights memory offload onload"
).split()
BACKEND_CALLS = ("forward_only", "forward_backward", "optimizer_step")
MATRIX, VECTOR = 768, 16 << 20  # numbers in the measured operands


class RankProfile:
    """The recording of a rank, from its creation to `stop`.

    While it records, the calls of worker and backend are wrapped; a backend's call ends with its kernels. Afterwards
    the wrappers are removed.

    Args:
        track: the name of the rank.
        kernels: whether torch's profiler records, too.
    """

    def __init__(self, worker: Profiled, track: str, kernels: bool):
        self._track, self._torch = track, None
        cuda, backend = worker.device.type == "cuda", worker.backend
        settle = torch.cuda.synchronize if cuda else None
        self._wrapped: list[tuple[Any, str, Callable[[], object] | None]] = [(worker, n, None) for n in WORKER_CALLS]
        self._wrapped += [(backend, name, settle) for name in BACKEND_CALLS]
        self._wrapped += [(frozen, "forward_only", settle) for frozen in (worker.reference, worker.teacher) if frozen]
        for owner, name, then in self._wrapped:
            setattr(owner, name, spans.timed(getattr(owner, name), name, then))
        if kernels:
            activity = torch.profiler.ProfilerActivity
            self._torch = torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if cuda else [])])
            self._torch.start()
        spans.start(track)

    def stop(self, begin: int, end: int, most: int) -> list[Span]:
        """End it. Return at most `most` spans from `begin` to `end`, in nanoseconds of the wall clock."""
        found = spans.stop()
        for owner, name, _ in self._wrapped:
            delattr(owner, name)
        if self._torch is not None:
            self._torch.stop()
            with tempfile.TemporaryDirectory(prefix="instep-profile-") as folder:
                path = Path(folder) / "trace.json"
                try:
                    self._torch.export_chrome_trace(str(path))
                    found += spans.of_torch(path, self._track)
                except (OSError, ValueError, RuntimeError) as error:  # a full disk, ...: a profile must not end a run
                    print(f"{self._track}: its kernels are not in the profile: {error}", flush=True)
        return spans.within(found, begin, end, most)


class Profiled:
    """The calls of a worker that start and end the recording of a step."""

    role: Role
    device: torch.device
    backend: TrainBackend
    reference: Frozen | None
    teacher: Frozen | None
    _profile: RankProfile | None = None

    def start_profile(self, ranks: list[int]) -> dict[str, Any]:
        """Start to record; torch's profiler records on `ranks`. Return the result of `machine`."""
        rank = self.backend.parallel.rank
        found = machine(self.device)
        self._profile = RankProfile(self, f"{self.role} rank {rank}", rank in ranks)
        return found

    def stop_profile(self, begin: int, end: int, most: int) -> list[Span]:
        """See `RankProfile.stop`."""
        profile, self._profile = self._profile, None
        return profile.stop(begin, end, most) if profile is not None else []


def machine(device: torch.device) -> dict[str, Any]:
    """Return the base of floors: the name of the GPU, or measured FLOP/s (float32) and bytes/s of a CPU.

    Bytes are bytes read and written.
    """
    if device.type == "cuda":
        return {"card": torch.cuda.get_device_name(device)}
    a, b = torch.ones(MATRIX, MATRIX), torch.ones(VECTOR)  # no random numbers: that would change the run's generator
    c = torch.empty_like(b)
    product = min(_seconds(lambda: a @ a) for _ in range(3))
    copy = min(_seconds(lambda: c.copy_(b)) for _ in range(3))
    return {"card": "", "flops": 2 * MATRIX**3 / product, "memory": 2 * 4 * VECTOR / copy}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
