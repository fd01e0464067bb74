"""Processes that die, stand still, hang or are slow; signals; ports; memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

from tests.e2e.commands import gone_within
from tests.faults.harness import ENDLESS, Place, Result
from tests.faults.registry import scenario, unindent


@scenario(worker_killed="error: a training worker is killed (SIGKILL, as the kernel does when memory is short)")
def worker_killed(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("worker", signal.SIGKILL)
        run.error("worker_killed", "WorkerError: actor rank 0 died (SIGKILL)", "memory", "--max-tokens-per-gpu")


@scenario(worker_stopped="error: a training worker is stopped (SIGSTOP)")
def worker_stopped(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("worker", signal.SIGSTOP)
        run.error("worker_stopped", "WorkerError: actor rank 0 is stopped", "SIGSTOP", "kill -CONT")


@scenario(slow=True, critic_killed="error: PPO's critic is killed (SIGKILL)")
def critic_killed(place: Place) -> None:
    with place.run(*ENDLESS, "--advantage-estimator", "ppo") as run:
        run.wait_steps()
        run.signal("worker", signal.SIGKILL, which=1)  # the actor's ranks start first
        run.error("critic_killed", "WorkerError: critic rank 0 died (SIGKILL)", "memory", "--max-tokens-per-gpu")


# With the interpreter's lock held, so that no thread of the process runs any more.
HANG = """
    import ctypes
    def hang(*args):
        lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
        lib.pthread_mutex_lock(mutex)
        mark()
        lib.pthread_mutex_lock(mutex)
    """


@scenario(slow=True, worker_hangs="error: a training worker hangs (`--heartbeat-timeout 3`)")
def worker_hangs(place: Place) -> None:
    patch = """
        from instep.training.hf.backend import HfBackend
        HfBackend.optimizer_step = hang
        """
    with place.run("--heartbeat-timeout", "3", patches={"worker": unindent(HANG, patch)}) as run:
        run.error("worker_hangs", "WorkerError: actor rank 0 has not answered for", "in hang", "in train")


@scenario(slow=True, engine_killed="error: an engine is killed (SIGKILL)")
def engine_killed(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("engine", signal.SIGKILL)
        run.error("engine_killed", "EngineError: engine 0 died (SIGKILL)", "log")


@scenario(slow=True, engine_http_killed="error: an engine's HTTP process is killed (SIGKILL)")
def engine_http_killed(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("engine", signal.SIGKILL, which=1)
        run.error(
            "engine_http_killed", "EngineError: engine 0 died with exit code 1", "other end of its pipe has ended"
        )


ALGEBRA = """
    from dataclasses import replace
    from instep.rollout.rewards.dispatch import compute_reward
    async def reward(args, sample, **kwargs):  # the built-in one, for an answer that needs algebra
        answer = dict(custom_rm_path="built-in", response=r"\\boxed{\\sqrt{4}}", label="2", status=sample.status)
        return await compute_reward(args, replace(sample, **answer))
    """


@scenario(
    reward_killed="recovered: a reward worker is killed (SIGKILL)",
    controller_paused="recovered: the controller stands still for 5 s (SIGSTOP, SIGCONT, as Ctrl-Z and `fg`)",
    stdout_lost="recovered: no one reads stdout any more (`instep train ... / head`)",
    terminal_closed="ended in order: the terminal is closed (SIGHUP)",
)
def rewards_and_stdout(place: Place) -> None:
    read, write = os.pipe()
    with place.run(*ENDLESS, hooks=unindent(ALGEBRA), stdout=write) as run:
        os.close(write)
        run.wait_steps()
        run.signal("reward", signal.SIGKILL)
        run.recovered("reward_killed", "a warning: its job is given to a new one", 10)
        run.pause("controller", 5)
        run.recovered("controller_paused", "nothing but a slow step", 15)
        os.close(read)
        run.mark()
        run.recovered("stdout_lost", "a line on stderr: what is printed is in RUN_DIR/logs/stdout.txt")
        kept = run.run_dir / "logs" / "stdout.txt"
        run.wait(lambda: kept.exists() and re.search(r" rollout \d+ \(", kept.read_text()) is not None)
        run.signal("controller", signal.SIGHUP)
        run.interrupted("terminal_closed", "nothing was saved (no --save)")
    assert "stdout was lost (Broken pipe)" in (run.run_dir / "summary.json").read_text()


@scenario(slow=True, stdout_full="recovered: the disk behind stdout is full")
def stdout_full(place: Place) -> None:
    with open("/dev/full", "w") as full, place.run(stdout=full.fileno()) as run:
        code, stderr, seconds = run.end()
    assert code == 0 and "stdout was lost (No space left on device)" in stderr, stderr[-3000:]
    assert "report: " in (run.run_dir / "logs" / "stdout.txt").read_text()
    seen = "a line on stderr: what is printed is in RUN_DIR/logs/stdout.txt"
    place.results["stdout_full"] = Result(seconds, seen)


HALF = """
    import signal, struct
    from instep.cluster.local import WorkerChannel
    result, num = WorkerChannel.result, 0
    def half(self, value):
        global num
        num += 1
        if num < 12:
            return result(self, value)
        mark()
        os.write(self._connection.fileno(), struct.pack("!i", 1_000_000) + b"x" * 1000)
        os.kill(os.getpid(), NUMBER)
    WorkerChannel.result = half
    """


@scenario(slow=True, message_killed="error: a training worker is killed in the middle of a message to the controller")
def message_killed(place: Place) -> None:
    patch = unindent(f"NUMBER = {int(signal.SIGKILL)}", HALF)
    with place.run(*ENDLESS, patches={"worker": patch}) as run:
        run.error("message_killed", "WorkerError: actor rank 0 died (SIGKILL), during ")


@scenario(slow=True, message_stopped="error: a training worker is stopped in the middle of a message to the controller")
def message_stopped(place: Place) -> None:
    patch = unindent(f"NUMBER = {int(signal.SIGSTOP)}", HALF)
    with place.run(*ENDLESS, patches={"worker": patch}) as run:
        run.error("message_stopped", "WorkerError: actor rank 0 is stopped, during ", "kill -CONT")


@scenario(slow=True, engine_stopped="error: an engine is stopped (SIGSTOP)")
def engine_stopped(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("engine", signal.SIGSTOP)
        run.error("engine_stopped", "EngineError: engine 0 is stopped", "SIGSTOP", "kill -CONT")


ANSWERS = """
    from aiohttp import web
    real, num = web.json_response, 0
    def json_response(body, **kwargs):
        global num
        num += "choices" in body
        return spoil() if num > 30 else real(body, **kwargs)
    web.json_response = json_response
    """


@scenario(slow=True, engine_hangs="error: an engine hangs (`--heartbeat-timeout 3`)")
def engine_hangs(place: Place) -> None:
    patch = unindent(ANSWERS, HANG, "spoil = hang")
    with place.run(*ENDLESS, "--heartbeat-timeout", "3", patches={"engine": patch}) as run:
        run.error("engine_hangs", "EngineError: engine 0 has not answered for", "in hang")


@scenario(slow=True, engine_garbage="error: an engine answers with garbage")
def engine_garbage(place: Place) -> None:
    garbage = """
        def spoil():
            mark()
            return web.Response(text="<html>It works!</html>")
        """
    with place.run(*ENDLESS, patches={"engine": unindent(ANSWERS, garbage)}) as run:
        run.error("engine_garbage", "EngineError: ", "JSON", "http://127.0.0.1:")


@scenario(
    slow=True,
    worker_slow="recovered: a training worker stands still for 2 s",
    engine_slow="recovered: an engine stands still for 2 s",
    row_deleted="recovered: a row of the data file is deleted during the run",
    sigterm="ended in order: SIGTERM",
    row_deleted_resume="error: a resume finds that a row of the data file was deleted",
)
def slow_and_deleted(place: Place) -> None:
    data = Path(shutil.copy(place.tiny / "train.jsonl", place.folder))
    ckpt = place.folder / "ckpt"
    flags = ("--prompt-data", str(data), "--save", str(ckpt), "--load", str(ckpt), "--save-interval", "1")
    with place.run(*ENDLESS, *flags) as run:
        run.wait_steps()
        run.pause("worker", 2)
        run.recovered("worker_slow", "nothing but a slow step; 3 s and more count as stopped")
        run.pause("engine", 2)
        run.recovered("engine_slow", "nothing but a slow step; 3 s and more count as stopped")
        run.mark()
        data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
        run.recovered("row_deleted", "nothing: the rows were read when the run began")
        run.signal("controller", signal.SIGTERM)
        run.interrupted("sigterm", str(ckpt), "the same command goes on from it")
    with place.run(*ENDLESS, *flags, name="again") as run:
        run.error("row_deleted_resume", "DataError: ", "63 usable prompts, but 64", str(data), code=2)


@scenario(ctrl_c_twice="ended in order: Ctrl-C twice within 0.05 s")
def ctrl_c_twice(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.signal("controller", signal.SIGINT)
        time.sleep(0.05)
        run.process.send_signal(signal.SIGINT)
        run.ended("ctrl_c_twice")


@scenario(
    two_runs="error: two runs in one folder",
    controller_killed="ended in order: the controller is killed (SIGKILL)",
    stale_lock="recovered: the lock of a run that was killed",
)
def two_runs(place: Place) -> None:
    folder = place.folder / "shared"
    with place.run(*ENDLESS, run_dir=folder, name="first") as first:
        first.wait_steps()
        with place.run(run_dir=folder, name="second") as second:
            text = second.error("two_runs", "ConfigError: another run is at work", "--run-dir", "wait for", code=2)
        assert f"process {first.process.pid} on {socket.gethostname()}" in text
        first.wait_steps()
        first.signal("controller", signal.SIGKILL)
        started = time.monotonic()
        assert gone_within(first.children, 5)
        seconds = time.monotonic() - started
        place.results["controller_killed"] = Result(seconds, "no process is left; the next run cleans shared memory")
        first.process.communicate()
    lock = folder / ".lock"
    started = time.monotonic()
    with place.run(*ENDLESS, run_dir=folder, name="third") as third:
        third.wait(lambda: f"process {third.process.pid} " in lock.read_text())
        place.results["stale_lock"] = Result(time.monotonic() - started, "nothing: the lock ends with its process")


@scenario(port_stolen="error: the engine's port is taken by another program before it can be used")
def port_stolen(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        patch = f"import instep.system.ports; instep.system.ports.free_port = lambda host: mark() or {port}"
        with place.run(patches={"controller": patch}) as run:
            run.error("port_stolen", "EngineError: engine 0 ", " code 2", str(port), "ddress already in use")


@scenario(slow=True, port_taken="error: `--engine-port` names one that is taken")
def port_taken(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with place.run("--engine-port", port) as run:
            run.error("port_taken", f"ConfigError: port {port} is taken", "--engine-port", code=2)


@scenario(slow=True, worker_out_of_memory="error: a training worker gets no more memory (a limit, RLIMIT_AS)")
def worker_out_of_memory(place: Place) -> None:
    patch = """
        from instep.training.hf.backend import HfBackend
        real = HfBackend.forward_backward
        def forward_backward(self, *args, more=False, **words):
            if more:  # a step that begins in the rollout
                return real(self, *args, more=more, **words)
            import psutil, resource, torch
            limit = psutil.Process().memory_info().vms + (1 << 28)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            mark()
            self.activations = torch.ones(1 << 28)
            return real(self, *args, **words)
        HfBackend.forward_backward = forward_backward
        """
    with place.run(patches={"worker": patch}) as run:
        words = ("ran out of memory in 'train'", "lower --max-tokens-per-gpu")
        run.error("worker_out_of_memory", "WorkerError: actor rank 0 ", *words)
