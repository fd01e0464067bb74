"""The guide of Atropos' example trainer, typed into bash, on one GPU in its three modes side by side.

    GUIDE_MODEL=FOLDER pytest -m gpu -s tests/gpu/test_atropos_guide.py

.venv-atropos is made by `instep install atropos`. GUIDE_MODEL is where `examples/atropos/make_model.py` has
run; without it the model is made first. INSTEP_GUIDE_DEVICE=cpu tries all of it without a GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.neighbours.atropos_guide import ATROPOS, Guide, make_model

DEVICE = os.environ.get("INSTEP_GUIDE_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(not ATROPOS.is_dir(), reason="`instep install atropos` makes .venv-atropos"),
]
MODES = os.environ.get("INSTEP_GUIDE_MODES", "none shared_vllm lora_only").split()
LIMIT = 520.0 if DEVICE == "cuda" else 900.0  # seconds, for all
# vLLM measures what is free as it starts, and stops where others free memory meanwhile, or have more than its share
# leaves (0.9 of the card, if nothing is said); with this it measures nothing.
MEASURES_NOTHING = "--kv-cache-memory-bytes 1073741824 --gpu-memory-utilization 0.2" if DEVICE == "cuda" else ""
MORE = "--device cuda --dtype bfloat16" if DEVICE == "cuda" else "--device cpu"


class Ran:
    """All modes. The vLLM of `none` measures the GPU, so that no other trainer ends before it has started for the last
    time: their environments, without which no step is trained, start after that."""

    def __init__(self, folder: Path, made: Path):
        self._deadline = time.monotonic() + LIMIT
        self._measured = threading.Event()
        if "none" not in MODES:
            self._measured.set()
        self.guides: dict[str, Guide] = {}
        for mode in MODES:
            # Adapters travel every third step, and an environment is some batches ahead.
            steps = {"none": 4, "shared_vllm": 12, "lora_only": 24}[mode]
            flags = {"more": MORE, "server": MEASURES_NOTHING, "trainer_gpu": 0}
            self.guides[mode] = Guide(mode, folder / mode, made, steps=steps, **flags)

    def run(self) -> dict[str, BaseException | None]:
        """By mode what went wrong."""
        with ThreadPoolExecutor(len(MODES)) as pool:
            jobs = {mode: pool.submit(self._one, guide) for mode, guide in self.guides.items()}
            return {mode: job.exception() for mode, job in jobs.items()}

    def _left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _one(self, guide: Guide) -> None:
        try:
            guide.start_server(self._left())
            if guide.mode == "none":
                guide.start_environment()
                guide.start_trainer()
                last = f"({guide.steps}/{guide.steps})"
                guide.wait_for(lambda: last in guide.read("trainer.log"), self._left(), "its last step")
                self._measured.set()
            else:
                guide.start_trainer()
                self._measured.wait(self._left())
                guide.seconds["its turn"] = time.monotonic() - guide.began
                guide.start_environment(guide.open_terminal())
            guide.wait_for_end(self._left())
        finally:
            if guide.mode == "none":
                self._measured.set()  # the others go on without it


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ran, dict[str, BaseException | None]]]:
    made = make_model(tmp_path_factory.mktemp("model"))
    ran = Ran(tmp_path_factory.mktemp("guide"), made)
    try:
        yield ran, ran.run()
    finally:
        with ThreadPoolExecutor(len(MODES)) as pool:
            list(pool.map(Guide.end, ran.guides.values()))


@pytest.mark.parametrize("mode", MODES)
def test_the_guide_trains(mode: str, ran: tuple[Ran, dict[str, BaseException | None]]) -> None:
    """As on the CPU; the scores of `none`, whose few steps are all of the first policy's tokens, are not compared."""
    runs, faults = ran
    guide = runs.guides[mode]
    seconds = ", ".join(f"{what} {s:.0f} s" for what, s in guide.seconds.items())
    step = sorted(row["perf/train_seconds"] for row in guide.rows)
    trained = f"a step {step[len(step) // 2]:.2f} s (first {step[-1]:.1f})" if step else "no step"
    print(f"\n{mode:12} {seconds}; {trained}; scores {' '.join(f'{s:.2f}' for s in guide.scores)}")
    if (fault := faults[mode]) is not None:
        raise fault
    guide.check()
    if mode != "none":
        guide.check_scores()
    log = guide.read("vllm.log")
    if mode == "shared_vllm" and DEVICE == "cuda":
        assert "IPC handles for single-copy mode" in log and '"ipc_handle_b64"' in guide.read("vllm_bridge_config.json")
