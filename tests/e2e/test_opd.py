"""On-policy distillation with a real engine as teacher, and with a frozen model in the workers."""

import json
import sys
import time

import pytest

from instep.cli import main
from instep.engines.engine import Engine
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from tests import keys
from tests.assets import make_checkpoint
from tests.bounds import allowed
from tests.e2e.commands import grpo_arguments, run, start
from tests.keys import key_file

NUM_ROLLOUT = 6
SMALL = "--rollout-batch-size 16 --n-samples-per-prompt 1 --lr 3e-3 --use-opd --rollout-max-response-len 12".split()


def serve(path, log):
    port = free_port()
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(path), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    process = SupervisedProcess("teacher", command, log, keys.ENVIRONMENT)
    engine = Engine("teacher", keys.knowing(f"http://127.0.0.1:{port}"), process)
    engine.wait_ready(120)
    return engine


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A served model of the student's vocabulary, other weights and another depth: its folder and its engine."""
    folder = tmp_path_factory.mktemp("teacher")
    make_checkpoint(folder / "hf", seed=5, layers=3)
    engine = serve(folder / "hf", folder / "log.txt")
    yield folder / "hf", engine
    engine.stop()


def arguments(tiny, run_dir, *more):
    words = grpo_arguments(tiny, run_dir, *SMALL, *more)
    if "--rm-type" not in more:  # the teacher is enough
        at = words.index("--rm-type")
        del words[at : at + 2]
    return words


def rows(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/opd_reverse_kl" in row]


@pytest.mark.parametrize(
    "kind, backend",
    [
        ("engine", "hf"),
        pytest.param("model", "megatron", marks=pytest.mark.slow),
        pytest.param("engine", "megatron", marks=pytest.mark.slow),
        pytest.param("model", "hf", marks=pytest.mark.slow),
    ],
)
def test_the_student_comes_nearer_to_its_teacher(tiny, teacher, tmp_path, kind, backend):
    path, engine = teacher
    served = ["--opd-teacher-url", engine.url, *key_file(tmp_path)]
    where = {"engine": served, "model": ["--opd-teacher-load", str(path)]}[kind]
    more = ["--train-backend", backend, "--num-rollout", str(NUM_ROLLOUT), "--micro-batch-size", "8", *where]
    done = run(arguments(tiny, tmp_path, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    distances = [row["train/opd_reverse_kl"] for row in rows(tmp_path)]
    assert len(distances) == NUM_ROLLOUT and distances[0] > 0.3
    assert sum(distances[-2:]) / 2 < 0.5 * distances[0]
    assert not any(
        "reward" in name for row in rows(tmp_path) for name in row if name.startswith(("rollout", "alarm/z"))
    )


@pytest.mark.slow
def test_both_kinds_of_teachers_say_the_same(tiny, teacher, tmp_path):
    """The first rollout of each run is the same: so are its distance and its step; with a reward beside the teacher."""
    path, engine = teacher
    seen = []
    for name, where in (
        ("engine", ["--opd-type", "sglang", "--rm-url", f"{engine.url}/generate", *key_file(tmp_path)]),
        ("model", ["--opd-type", "megatron", "--opd-teacher-load", str(path)]),
    ):
        more = [*where, "--rm-type", "math", "--n-samples-per-prompt", "2", "--num-rollout", "1"]
        done = run(arguments(tiny, tmp_path / name, *more, "--opd-kl-coef", "0.3", "--label-key", "label"))
        assert done.returncode == 0, done.stderr[-3000:]
        (row,) = rows(tmp_path / name)
        assert "rollout/reward_mean" in row
        seen.append([row[n] for n in ("train/opd_reverse_kl", "train/loss", "train/grad_norm")])
    assert seen[0] == pytest.approx(seen[1], rel=1e-4) and seen[0][0] > 0.1


def refused(words, capsys, exit_code=1):
    assert main(words) == exit_code
    error = capsys.readouterr().err
    assert "Traceback" not in error and "remedy" in error
    return error


def test_a_teacher_that_is_not_there(tiny, tmp_path, capsys):
    url, began = f"http://127.0.0.1:{free_port()}", time.monotonic()
    error = refused(arguments(tiny, tmp_path, "--opd-teacher-url", url), capsys)
    assert "EngineError: the teacher gave no answer" in error and f"--opd-teacher-url {url}" in error
    assert time.monotonic() - began < allowed(30)


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary(tiny, tmp_path, capsys):
    from tests.engines.running import make_checkpoint as make_other

    make_other(tmp_path / "other", tied=True)
    error = refused(arguments(tiny, tmp_path / "a", "--opd-teacher-load", str(tmp_path / "other")), capsys, 2)
    assert "the teacher has another vocabulary" in error and f"--opd-teacher-load {tmp_path / 'other'}" in error
    engine = serve(tmp_path / "other", tmp_path / "log.txt")
    try:
        error = refused(arguments(tiny, tmp_path / "b", "--opd-teacher-url", engine.url, *key_file(tmp_path)), capsys)
    finally:
        engine.stop()
    assert "EngineError: the teacher has another vocabulary" in error and engine.url in error


@pytest.mark.slow
def test_a_teacher_that_dies_on_the_way(tiny, teacher, tmp_path):
    engine = serve(teacher[0], tmp_path / "log.txt")
    where = ["--opd-teacher-url", engine.url, *key_file(tmp_path)]
    running = start(arguments(tiny, tmp_path / "run", "--num-rollout", "1000", *where))
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run"):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        engine.process.kill()
        _, error = running.communicate(timeout=240)
    finally:
        running.kill()
        engine.stop()
    assert running.returncode == 1 and "Traceback" not in error
    assert "EngineError: the teacher gave no answer" in error and f"--opd-teacher-url {engine.url}" in error
