"""An engine that somebody else runs does not stay paused when the trainer that has paused it dies."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.engines import keys
from instep.engines.engine import Engine, EngineRefusal
from instep.engines.http import get_json
from instep.system.scratch import Scratch, memory_root
from instep_engine import MEMORY_VARIABLE
from instep_engine.lease import EXPIRED, HELD
from instep_engine.place import GOLDEN, SYNC
from tests.assets import make_checkpoint
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, on_sglang, on_vllm
from tests.e2e.lease_holder import LEASE

PAUSE, RESUME = 'engine.pause("abort", timeout=30)', "engine.resume(timeout=30)"
START = 'engine.start_update("9", "nonce", timeout=30)'
ATTACH = (
    "from pathlib import Path; from instep.weights.memory import attach, sample_digests; "
    "memory = attach(Path(folder), lock=True); "
    "views = [parts[0].view for parts in memory.slices[memory.nonces[0]].values()][:4]"
)
TOKENS = [5, 6, 7, 8]


class Controller:
    """A process of `lease_holder.py`, which pauses the engine at first.

    Args:
        folder: where the engine shares its memory, into which this process writes then.
    """

    def __init__(self, engine: Engine, first: str = PAUSE, folder: str = ""):
        words = [sys.executable, "-m", "tests.e2e.lease_holder", engine.url, keys.key_of(engine.url)]
        words += [engine.kind.name, folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=ENVIRONMENT, **pipes)
        assert self.process.stdin and self.process.stdout
        self.words, self.answers = self.process.stdin, self.process.stdout
        assert self.do(first) == "done"

    def do(self, code: str) -> str:
        self.words.write(code + "\n")
        self.words.flush()
        return self.answers.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with Scratch(f"{SYNC}test-", memory_root()) as folder:
        yield folder


FLAGS = {"embedded": ["--rollout-backend", "embedded"], "vllm": on_vllm(), "sglang": on_sglang()}
OTHERS = [pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.slow]) for name in ("vllm", "sglang")]


@pytest.fixture(scope="module", params=["embedded", *OTHERS])
def served(
    request: pytest.FixtureRequest, tiny: Path, memory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine; the embedded one shares its memory."""
    folder = tmp_path_factory.mktemp("served")
    model = make_checkpoint(folder / "hf", head_dim=32)
    words = ["--hf-checkpoint", str(model), *FLAGS[request.param]]
    args = parse(grpo_arguments(tiny, folder, *words)[1:], "train")
    args = args.replace(device="cpu", precision="fp32", rollout_backend=request.param)
    env = {MEMORY_VARIABLE: str(memory)} if request.param == "embedded" else {}
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=folder / "logs", env=env)
    try:
        engine.wait_ready(300)
        yield engine
    finally:
        engine.stop()


def paused(engine: Engine) -> bool:
    return bool(get_json(engine.url + "/is_paused", 10.0)["is_paused"])


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (there := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return there


def test_the_engine_goes_on_when_its_trainer_dies_before_a_weight_was_loaded(served: Engine) -> None:
    controller = Controller(served)
    time.sleep(LEASE + 1.0)
    assert paused(served)  # the lease was renewed
    controller.end()
    assert within(60.0, lambda: not paused(served))
    assert len(served.prompt_log_probs(TOKENS, timeout=60)) == 3
    again = Controller(served, START)  # the next run, whose session begins before the pause
    assert again.do(PAUSE) == "done" and paused(served)
    assert again.do(RESUME) == "done" and not paused(served)
    again.end()


def test_a_trainer_that_stood_still_meanwhile_is_refused(served: Engine) -> None:
    slow = Controller(served)
    slow.process.send_signal(signal.SIGSTOP)
    assert within(60.0, lambda: not paused(served))
    slow.process.send_signal(signal.SIGCONT)
    for code in (START, RESUME):
        refused = slow.do(code)
        assert EXPIRED in refused and "resume it from its last checkpoint" in refused
    other = Controller(served)
    assert HELD in slow.do(RESUME) and paused(served)  # the pause is another trainer's
    assert other.do(RESUME) == "done" and not paused(served)
    slow.end()
    other.end()
    assert len(served.prompt_log_probs(TOKENS, timeout=60)) == 3


def test_weights_that_a_killed_trainer_has_half_written_are_served_to_nobody(served: Engine, memory: Path) -> None:
    if served.kind.name != "embedded":
        pytest.skip("a server with buckets; tests/unit/test_lease.py has what its server does")
    before = served.prompt_log_probs(TOKENS, timeout=60)
    writer = Controller(served, folder=str(memory))
    assert writer.do(ATTACH) == "done" and writer.do("[view.mul_(2) for view in views]") == "done"
    writer.end()
    assert within(60.0, lambda: not paused(served))
    with pytest.raises(EngineRefusal, match="503: .*the trainer that wrote into these weights stood still, or died"):
        served.prompt_log_probs(TOKENS, timeout=60)

    again = Controller(served, folder=str(memory))
    assert again.do(ATTACH) == "done" and again.do("[view.div_(2) for view in views]") == "done"
    parts = "{name: [part.view for part in parts] for name, parts in worker.items()}"
    held = f"{{nonce: sample_digests({parts}) for nonce, worker in memory.slices.items()}}"
    told = f'engine.update({{"backend": "single-copy", "digests": {held}}}, timeout=60)'
    for code in (START, told, 'engine.finish_update("9", [], timeout=60)'):
        assert again.do(code) == "done"
    again.end()  # once its session was whole
    assert within(60.0, lambda: not paused(served))
    assert served.prompt_log_probs(TOKENS, timeout=60) == pytest.approx(before, abs=1e-5)


def test_an_engine_with_weights_of_a_session_that_did_not_end_serves_nothing(served: Engine) -> None:
    """vLLM and SGLang end. The embedded engine refuses all requests until a session has succeeded. The last test."""
    assert served.process is not None
    controller = Controller(served)
    with Scratch(GOLDEN) as root:
        (model,) = get_json(served.url + "/v1/models", 10.0)["data"]
        shutil.copytree(model["id"], root / "hf")
        assert controller.do(START) == "done"
        info = {"backend": "disk", "path": str(root / "hf")}
        assert controller.do(f"engine.update({info!r}, timeout=60)") == "done"
        controller.end()
        if served.kind.name != "embedded":
            assert within(90.0, lambda: served.process is not None and not served.process.alive())
            return
    assert within(60.0, lambda: not paused(served))
    with pytest.raises(EngineRefusal, match="503: the last weight update failed"):
        served.prompt_log_probs(TOKENS, timeout=60)
