"""A hook that raises what ends a thread or a process, or ends its process, becomes the named error of that hook."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.cluster.local import WorkerGroup
from instep.errors import ConfigError, InstepError, RewardError, RolloutError
from instep.rollout import runtime
from instep.rollout.rewards.dispatch import apply_rewards
from instep.system.endings import raise_for_exit
from instep.system.hooks import Hook
from instep.system.processes import FolderLock
from instep.system.scratch import Scratch, left
from instep.types import Sample, Status
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments, run

ME = __name__


class Own(BaseException):
    """Not an Exception."""


ENDINGS = ("SystemExit", "KeyboardInterrupt", "Own", "os._exit", "CancelledError", "StopIteration")
how = ""


def _end() -> None:
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if how in ("Own", "CancelledError", "StopIteration"):
        raise {"Own": Own, "CancelledError": asyncio.CancelledError}.get(how) or getattr(builtins, how)
    if how == "os._exit":
        os._exit(0)
    raise SystemExit(3)


def reward(args, sample, **kwargs):
    _end()


async def async_reward(args, sample, **kwargs):
    await asyncio.sleep(0)
    _end()


def awaitable_reward(args, sample, **kwargs):
    return async_reward(args, sample)


def trl_reward(prompts, completions, **kwargs):
    _end()


async def with_a_task(args, sample, **kwargs):
    asyncio.create_task(async_reward(args, sample))
    await asyncio.sleep(600)


def hook(*args, **kwargs):
    _end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 8)
    return folder


@pytest.fixture(params=ENDINGS)
def ending(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way in which the hooks of this file end, in a run."""
    global how
    how = request.param
    take_back = raise_for_exit()
    yield how
    take_back()
    runtime.shutdown()


def rewarded(folder: Path, path: str) -> None:
    line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --input-key prompt --label-key label "
    line += "--rollout-batch-size 2 --n-samples-per-prompt 2 "
    line += f"--num-rollout 1 --actor-num-gpus-per-node 1 --device cpu --run-dir {folder}/run --reward-timeout 300"
    args = parse([*line.split(), "--custom-rm-path", f"{ME}.{path}"], "train").view({})
    sample = Sample(index=0, group_index=0, prompt="1", label="2", response="2", tokens=[1, 2], response_length=1)
    sample.status = Status.COMPLETED
    runtime.run(apply_rewards(args, [sample], None), timeout=200)


@pytest.mark.parametrize("path", ["reward", "async_reward", "awaitable_reward", "trl_reward"])
def test_a_reward(folder: Path, ending: str, path: str) -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"the reward function raised .*{ending}") as caught:
        rewarded(folder, path)
    assert f"--custom-rm-path {ME}.{path}" in caught.value.where and __file__ in caught.value.where
    assert time.monotonic() - began < 100, "not after --reward-timeout"
    assert runtime.run(asyncio.sleep(0, 7), timeout=100) == 7, "the loop lives"


@pytest.mark.parametrize("ending", ["SystemExit", "KeyboardInterrupt", "os._exit"], indirect=True)
def test_a_task_that_a_hook_began(folder: Path, ending: str) -> None:
    with pytest.raises(RolloutError, match=rf"a task that a hook started raised .*{ending}") as caught:
        rewarded(folder, "with_a_task")
    assert __file__ in caught.value.where
    assert runtime.run(asyncio.sleep(0, 7), timeout=100) == 7, "the loop lives"


async def cancels_itself(args, sample, **kwargs):
    asyncio.current_task().cancel()
    await asyncio.sleep(600)


async def cancels_all(args, sample, **kwargs):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(600)


async def stops_the_loop(args, sample, **kwargs):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(600)


async def sleeps():
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("cancels_itself", "the reward function cancelled its own task"),
        ("cancels_all", "a hook has cancelled tasks of the rollout"),
        ("stops_the_loop", "a hook has stopped the loop of rollouts"),
    ],
)
def test_a_reward_that_changes_the_loop(folder: Path, path: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(InstepError, match=told):
        rewarded(folder, path)
    assert time.monotonic() - began < 100, "not after --reward-timeout"
    assert runtime.run(asyncio.sleep(0, 7), timeout=100) == 7, "the loop lives"
    runtime.shutdown()


def test_a_cancellation_that_was_asked_for_is_no_error_of_a_hook() -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(Hook("--custom-generate-function-path", f"{ME}.sleeps").acall())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_any_hook(ending: str) -> None:
    one = Hook("--rollout-sample-filter-path", f"{ME}.hook")
    if ending == "KeyboardInterrupt":  # in the main thread that is Ctrl-C
        with pytest.raises(KeyboardInterrupt):
            one.call()
    else:
        with pytest.raises(RolloutError, match=rf"{ME}.hook raised .*{ending}") as caught:
            one.call()
        assert "--rollout-sample-filter-path" in caught.value.where and f"{__file__}:" in caught.value.where
    with pytest.raises(RolloutError, match=rf"{ME}.hook raised .*{ending}"):
        runtime.run(one.acall(), timeout=100)


def test_a_module_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing 'leaves_at_once' raised SystemExit\\(0\\)"):
        Hook("--custom-rm-path", "leaves_at_once.reward").call()


def waits(*args: Any) -> None:
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    for _ in range(6000):
        time.sleep(0.05)


def handled(*args: Any) -> None:
    from instep.cli import _terminate_like_interrupt

    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        _terminate_like_interrupt()
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def in_asyncio(*args: Any) -> None:
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    asyncio.run(asyncio.sleep(300))


@pytest.mark.parametrize("path", ["waits", "handled", "in_asyncio"])
def test_ctrl_c_within_a_hook_stays_an_interrupt(path: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        Hook("--rollout-sample-filter-path", f"{ME}.{path}").call()


def test_a_child_of_a_hook_ends_as_it_likes() -> None:
    real = os._exit
    take_back = raise_for_exit()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    take_back()
    assert os._exit is real


def test_a_hook_that_never_ends_keeps_no_process() -> None:
    code = """if True:
        import asyncio
        from instep.rollout import runtime
        async def hook():
            while True:
                try:
                    await asyncio.sleep(600)
                except BaseException:
                    pass
        async def rollout():
            task = asyncio.create_task(hook())
            await asyncio.sleep(0)
            task.cancel()
        runtime.run(rollout())
        runtime.shutdown()
        print("the end")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize("how", ["ctypes.string_at(0)", "os._exit(0)"])
def test_a_run_whose_reward_ends_it(how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward.py").write_text(f"import ctypes\nimport os\n\ndef reward(args, sample):\n    {how}\n")
    monkeypatch.setitem(run.__globals__["ENVIRONMENT"], "PYTHONPATH", str(tmp_path))
    done = run(grpo_arguments(folder, tmp_path / "run", "--custom-rm-path", "my_reward.reward"))
    assert done.returncode == (-signal.SIGSEGV if "string_at" in how else 1), done.stderr
    place = 'my_reward.py", line 5 in reward' if "string_at" in how else "my_reward.py:5 in reward"
    assert f"{tmp_path}/{place}" in done.stderr and "Traceback" not in done.stderr
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == ("string_at" in how)


WORKER = """
from instep.cluster.worker_main import answer, leave
from instep.system.hooks import Hook

class Worker:
    def train(self):
        Hook("--custom-loss-function-path", "my_loss.loss").call()

leave(answer(lambda event: Worker()))
"""
IN_WORKERS = {
    "ctypes.string_at(0)": "my_loss.loss ended actor rank 0 by a fault: Segmentation fault, during 'train'",
    "os.abort()": "my_loss.loss ended actor rank 0 by a fault: Aborted, during 'train'",
    "os._exit(0)": r"my_loss.loss raised SystemExit\('os._exit\(0\)'\)",
}


@pytest.mark.parametrize("how", IN_WORKERS)
def test_a_hook_that_ends_a_worker(how: str, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(f"import ctypes\nimport os\n\ndef loss(*args):\n    {how}\n")
    (tmp_path / "my_worker.py").write_text(WORKER)
    workers = WorkerGroup("actor", 1, tmp_path, {"PYTHONPATH": str(tmp_path)}, module="my_worker")
    workers.hooks = [("--custom-rm-path", "my_reward.reward"), ("--custom-loss-function-path", "my_loss.loss")]
    try:
        with pytest.raises(RolloutError, match=IN_WORKERS[how]) as caught:
            workers.call("train", timeout=200)
    finally:
        workers.close()
    assert caught.value.where.startswith("--custom-loss-function-path my_loss.loss, ")
    assert f"{tmp_path}/my_loss.py:5 in loss" in caught.value.where


def test_a_run_whose_loss_ends_its_worker(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loss.py").write_text("import ctypes\n\ndef loss(*args):\n    ctypes.string_at(0)\n")
    monkeypatch.setitem(run.__globals__["ENVIRONMENT"], "PYTHONPATH", str(tmp_path))
    flags = ["--loss-type", "custom_loss", "--custom-loss-function-path", "my_loss.loss"]
    done = run(grpo_arguments(folder, tmp_path / "run", *flags))
    assert done.returncode == 1 and "my_loss.loss ended actor rank 0 by a fault" in done.stderr, done.stderr
    assert f"--custom-loss-function-path my_loss.loss, {tmp_path}/my_loss.py:4 in loss" in done.stderr


def test_a_child_that_a_hook_forked_keeps_no_lock(tmp_path: Path) -> None:
    lock, scratch = FolderLock(tmp_path / "run", "--run-dir"), Scratch("instep-endings-", tmp_path)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tells, b".")
        time.sleep(600)
        os._exit(0)
    try:
        assert os.read(told, 1) == b"."
        with pytest.raises(ConfigError, match="another run is at work"):
            FolderLock(tmp_path / "run", "--run-dir")
        lock.release()
        FolderLock(tmp_path / "run", "--run-dir").release()
        os.close(scratch._fd)  # as at the end of this process
        assert left(tmp_path) == [scratch.path]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        scratch._fd = -1


def test_an_end_of_a_child_changes_no_other_descriptor(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run", "--run-dir")
    child = os.fork()
    if child == 0:
        file = os.open("/dev/null", os.O_RDONLY)  # perhaps under the number of the lock
        lock.release()
        try:
            os.fstat(file)
            os._exit(0)
        except OSError:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(InstepError):
        FolderLock(tmp_path / "run", "--run-dir")
    lock.release()
