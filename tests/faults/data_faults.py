"""Full disks, damaged files, numbers that are none, a clock that jumps, and users' functions with faults."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.checkpoints.integrity import check_whole
from tests.faults.harness import ENDLESS, Place, Result, steps
from tests.faults.registry import scenario, unindent


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[dict[str, str]]:
    """A file system of so many bytes at `folder` where this user may mount one; else no file may be that large."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]
    if os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0:
        try:
            yield {}
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    else:
        yield {"all": f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))"}


@scenario(disk_full_at_save="error: the disk is full when a checkpoint is saved")
def disk_full_at_save(place: Place) -> None:
    """Others fill the disk after the start, until half of a checkpoint has room on it."""
    sizes = {p: p.stat().st_size for p in place.saved.rglob("*") if p.is_file()}
    marking = """
        import instep.controller.trainer as module, shutil
        save = module.begin_checkpoint
        def begin_checkpoint(*args):
            if FILL:
                with open(f"{args[0]}/../filler", "wb") as file:
                    file.write(bytes(max(0, shutil.disk_usage(args[0]).free - ROOM)))
            mark()
            return save(*args)
        module.begin_checkpoint = begin_checkpoint
        """
    total = sum(sizes.values())
    with small_disk(place.folder / "disk", 2 * total) as limit:
        ckpt = Path(shutil.copytree(place.saved, place.folder / "disk" / "ckpt"))
        if limit:  # by file size: below that of the trainer's file
            limit = {"all": limit["all"].replace(str(2 * total), str(max(sizes.values()) - 1))}
        marking = marking.replace("FILL", str(not limit)).replace("ROOM", str(total // 4))
        flags = ("--save", str(ckpt), "--load", str(ckpt), "--save-interval", "1", "--num-rollout", "4")
        with place.run(*flags, patches={"controller": marking, **limit}) as run:
            run.error(
                "disk_full_at_save",
                "CheckpointError: the checkpoint of iteration 2 could",
                "MB are free",
                f"iteration 1 is complete in {ckpt}",
            )
        left = sorted(p.name for p in ckpt.iterdir() if p.name != ".lock")
        assert left == ["iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt"], left
        assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "1"
        check_whole(ckpt / "iter_0000001")


@scenario(slow=True, disk_full_at_metrics="error: the disk is full when metrics are written")
def disk_full_at_metrics(place: Place) -> None:
    patch = """
        from instep.observability.sinks import JsonLines
        real = JsonLines.write
        def write(self, row):
            import resource
            if row.get("step") == 1:  # no file may grow any more
                mark()
                size = self._file.tell()
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
            return real(self, row)
        JsonLines.write = write
        """
    with place.run(*ENDLESS, patches={"controller": patch}) as run:
        run.error("disk_full_at_metrics", "OutputError: RUN_DIR".replace("RUN_DIR", str(run.run_dir)), "free space")
    assert len(steps(run.run_dir)) == 1  # half of a row at the end is none


DROP_DAC_OVERRIDE = """
    import ctypes  # root may write everywhere, unless it gives up the right to
    header, caps = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, caps) == 0
    caps[0] &= ~2
    assert libc.capset(header, caps) == 0
    """


@scenario(read_only_run_dir="error: `--run-dir` is read-only")
def read_only_run_dir(place: Place) -> None:
    folder = place.folder / "read-only"
    folder.mkdir()
    folder.chmod(0o500)
    with place.run(run_dir=folder, patches={"controller": DROP_DAC_OVERRIDE}) as run:
        run.error("read_only_run_dir", f"OutputError: {folder} cannot be written: Permission denied", "--run-dir")


@scenario(checkpoint_truncated="error: a file of the newest checkpoint is cut off")
def checkpoint_truncated(place: Place) -> None:
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    victim = max((ckpt / "iter_0000001").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    with open(victim, "r+b") as file:
        file.truncate(victim.stat().st_size // 2)
    flags = ("--load", str(ckpt), "--num-rollout", "2")
    with place.run(*flags) as run:
        words = ("CheckpointError: the checkpoint iter_0000001 is damaged", str(victim), "--ckpt-step: 0")
        run.error("checkpoint_truncated", *words)
    with place.run(*flags, "--ckpt-step", "0", "--save", str(ckpt), name="again") as run:
        code, stderr, _ = run.end()
    assert code == 0 and [row["step"] for row in steps(run.run_dir)] == [1], stderr
    check_whole(ckpt / "iter_0000001")


@scenario(slow=True, save_killed="recovered: a run was killed (SIGKILL) in the middle of a save, and is started again")
def save_killed(place: Place) -> None:
    kill = """
        import instep.checkpoints.folders as module, signal
        module.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        """
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    flags = ("--load", str(ckpt), "--save", str(ckpt), "--num-rollout", "3")
    with place.run(*flags, patches={"controller": kill}) as run:
        assert run.end()[0] == -signal.SIGKILL
    half = ckpt / ".iter_0000002.partial"
    assert half.is_dir()
    with place.run(*flags, name="again") as run:
        run.mark()
        run.recovered("save_killed", "nothing: what is not complete is not there")
        assert run.end()[0] == 0 and not half.exists()
    assert [row["step"] for row in steps(run.run_dir)] == [2]
    check_whole(ckpt / "iter_0000002")


@scenario(tracker_corrupt="error: `latest_checkpointed_iteration.txt` holds garbage")
def tracker_corrupt(place: Place) -> None:
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    (ckpt / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x00garbage")
    with place.run("--load", str(ckpt)) as run:
        words = ("is neither an iteration", str(ckpt), "--ckpt-step: 0, 1")
        run.error("tracker_corrupt", "CheckpointError: ", *words)


@scenario(shm_corrupted="error: a byte of a weight changes in shared memory during a sync")
def shm_corrupted(place: Place) -> None:
    patch = """
        from instep.engines.engine import Engine
        real = Engine.post
        def post(self, path, body=None, **kwargs):
            manifest = (body or {}).get("update_info", {}).get("manifest")
            if manifest and manifest["version"] == "2":
                with open(manifest["path"], "r+b") as file:
                    first = file.read(1)[0]
                    file.seek(0)
                    file.write(bytes([first ^ 1]))
                mark()
            return real(self, path, body, **kwargs)
        Engine.post = post
        """
    with place.run(*ENDLESS, patches={"controller": patch}) as run:
        run.error("shm_corrupted", "SyncError: version 2 did not arrive", "tensor model.embed_tokens.weight")


@scenario(slow=True, shm_full="error: shared memory is full during a sync")
def shm_full(place: Place) -> None:
    patch = """
        from instep.weights.shm import Shm
        send = Shm.send
        def send_after_limit(self, source, order, emit):
            import resource
            if order.version == "2":  # no file may be that large any more
                mark()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            return send(self, source, order, emit)
        Shm.send = send_after_limit
        """
    with place.run(*ENDLESS, patches={"worker": patch}) as run:
        run.error(
            "shm_full", "SyncError: a bucket of 0.4 MB does not fit", "/dev/shm", "--shm-size", "--weight-sync disk"
        )


# ---- numbers -----------------------------------------------------------------------------------------------------


@scenario(slow=True, nan_in_weights="error: a weight becomes NaN")
def nan_in_weights(place: Place) -> None:
    patch = """
        from instep.training.hf.backend import HfBackend
        real = HfBackend.optimizer_step
        def optimizer_step(self, lr):
            out = real(self, lr)
            next(self.policy.parameters()).data.view(-1)[0] = float("nan")
            mark()
            return out
        HfBackend.optimizer_step = optimizer_step
        """
    with place.run(*ENDLESS, patches={"worker": patch}) as run:
        run.error("nan_in_weights", "TrainingError: ", "weights are not finite: model.", "--lr")


GRADIENTS = """
    from instep.training.hf.backend import HfBackend
    real, num = HfBackend.optimizer_step, 0
    def optimizer_step(self, lr):
        global num
        num += 1
        if bad(num):
            mark()
            next(p for p in self.policy.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return real(self, lr)
    HfBackend.optimizer_step = optimizer_step
    """


@scenario(nan_in_gradients_once="recovered: the gradients of one optimizer step are NaN")
def nan_in_gradients_once(place: Place) -> None:
    with place.run("--num-rollout", "3", patches={"worker": unindent("bad = lambda num: num == 2", GRADIENTS)}) as run:
        code, stderr, seconds = run.end()
    assert code == 0 and stderr.count("it was skipped") == 1, stderr
    assert [row["train/skipped_steps"] for row in steps(run.run_dir)] == [0, 1, 0]
    seen = "a warning; the step is skipped, `train/skipped_steps` is 1"
    place.results["nan_in_gradients_once"] = Result(seconds, seen)


@scenario(slow=True, nan_in_gradients="error: the gradients of three optimizer steps in a row are NaN")
def nan_in_gradients(place: Place) -> None:
    with place.run(*ENDLESS, patches={"worker": unindent("bad = lambda num: num >= 2", GRADIENTS)}) as run:
        run.error("nan_in_gradients", "TrainingError: the gradients of 3 optimizer steps", "--lr")


@scenario(
    slow=True,
    clock_jumps="recovered: the clock of every process jumps by 6 hours, forward and back, twice a second",
)
def clock_jumps(place: Place) -> None:
    patch = """
        real, monotonic = time.time, time.monotonic
        time.time = lambda: real() + 6 * 3600 * (int(2 * monotonic()) % 2)
        """
    with place.run(*ENDLESS, patches={"all": patch}) as run:
        run.wait_steps(2)
        run.mark()
        run.recovered("clock_jumps", "nothing: every wait counts monotonic time")


# ---- the user's functions ----------------------------------------------------------------------------------------


@scenario(slow=True, reward_nan="error: a reward is NaN")
def reward_nan(place: Place) -> None:
    hooks = """
        async def reward(args, sample, **kwargs):
            return float("nan")
        """
    with place.run(hooks=marking(hooks)) as run:
        run.error("reward_nan", "RewardError: the reward nan is not a finite number", "my_hooks.reward", "sample")


@scenario(reward_raises="error: a reward function raises")
def reward_raises(place: Place) -> None:
    hooks = """
        def reward(args, sample, **kwargs):
            return 1 / 0
        """
    with place.run(hooks=marking(hooks)) as run:
        run.error("reward_raises", "RewardError: ", "ZeroDivisionError", "my_hooks.reward", "sample")


@scenario(reward_hangs="error: a reward function hangs (`--reward-timeout 2`)")
def reward_hangs(place: Place) -> None:
    hooks = """
        import time
        async def reward(args, sample, **kwargs):
            time.sleep(1000)
        """
    with place.run("--reward-timeout", "2", hooks=marking(hooks)) as run:
        run.error("reward_hangs", "RewardError: the reward function took more than 2 s", "my_hooks.reward")


@scenario(
    slow=True, reward_leaks="error: a reward function leaks memory (`--controller-memory-limit 0.4 --no-hook-trial`)"
)
def reward_leaks(place: Place) -> None:
    hooks = """
        kept = []
        async def reward(args, sample, **kwargs):
            kept.append(b"x" * 100_000_000)
            return 1.0
        """
    with place.run(*ENDLESS, "--controller-memory-limit", "0.4", "--no-hook-trial", hooks=marking(hooks)) as run:
        words = ("the controller has grown by", "my_hooks.reward", "--controller-memory-limit")
        run.error("reward_leaks", "RolloutError: ", *words)


def marking(hooks: str, function: str = "def reward") -> str:
    """The hooks' module; the first call of `function` is the time of the fault."""
    lines = unindent(hooks).splitlines()
    body = next(i for i, line in enumerate(lines) if function in line) + 1
    return "\n".join(["from sitecustomize import mark", *lines[:body], "    mark()", *lines[body:]])
