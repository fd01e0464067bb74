"""The files of a run, TensorBoard and W&B: written and read back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from instep.errors import OutputError
from instep.observability.report import make_report
from instep.observability.run_folder import move_run_aside
from instep.observability.sinks import JsonLines, read_json_lines, write_json
from instep.system.private import without_secrets
from instep.types import Status
from tests.logged_run import make_groups, run

# Files


def test_metrics_file_holds_each_row_at_once_and_null_for_nan(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        log.log(0, {"train/loss": 0.5, "train/engine_kl": math.nan, "train/lr": math.inf, "train/n": np.float32(2)})
        text = (tmp_path / "metrics.jsonl").read_text()  # before closing: a crash loses nothing
        assert "NaN" not in text and "Infinity" not in text
        row = json.loads(text)
        assert abs(row.pop("time") - time.time()) < 60
        assert row == {"step": 0, "train/loss": 0.5, "train/engine_kl": None, "train/lr": None, "train/n": 2.0}
        with pytest.raises(ValueError):
            log.log(1, {"train/loss": "much"})


def test_resume_cuts_the_rows_from_its_step_on(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        for step in range(4):
            log.log(step, {"train/loss": float(step)})
            log.samples(step, make_groups(1, 1), "train", 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')  # the crash came in the middle of a line
    with run(tmp_path, resume_from_step=2) as log:
        assert log.progress.steps_done == 2
        log.log(2, {"train/loss": 20.0})
        log.samples(2, make_groups(1, 1), "train", 1)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert [row["rollout_id"] for row in read_json_lines(tmp_path / "samples.jsonl")] == [0, 1, 2]


def test_a_new_run_moves_an_earlier_one_aside_by_number(tmp_path: Path) -> None:
    kept = {}
    for number in (1, 2):
        with run(tmp_path, use_tensorboard=True) as log:
            log.log(0, {"train/loss": float(number)})
            log.samples(0, make_groups(), "train", 1)
            log.finish({"num_steps": number})
            (tmp_path / "logs").mkdir(exist_ok=True)
            for name in ("train.log", "router-of-mine.txt"):  # a user's, such as `instep train ... > logs/train.log`
                (tmp_path / "logs" / name).write_text("mine")
            (tmp_path / "logs" / "engine-0.log").write_text(f"engine {number}")
            (tmp_path / "hf").mkdir(exist_ok=True)
        kept[number] = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with run(tmp_path) as log:
        assert read_json_lines(tmp_path / "metrics.jsonl") == [] and not (tmp_path / "summary.json").exists()
        assert f"its files are in {tmp_path / 'old-2'} now" in log.progress.console.file.getvalue()
    folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert folders == ["hf", "logs", "old-1", "old-2", "tensorboard"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["router-of-mine.txt", "train.log"]
    for number in (1, 2):
        old = {str(p.relative_to(tmp_path / f"old-{number}")) for p in (tmp_path / f"old-{number}").rglob("*.*")}
        assert {"metrics.jsonl", "samples.jsonl", "summary.json", "report.html", "config.json"} <= old
        for name in ("metrics.jsonl", "summary.json", "logs/engine-0.log"):
            assert (tmp_path / f"old-{number}" / name).read_bytes() == kept[number][name]
        assert [p.name for p in (tmp_path / f"old-{number}" / "logs").iterdir()] == ["engine-0.log"]
        assert len(list((tmp_path / f"old-{number}" / "tensorboard").iterdir())) == 1
        assert make_report(tmp_path / f"old-{number}").exists()


def test_nothing_is_moved_from_a_folder_where_no_run_was(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("engine-0.log", "out.txt"):  # that of `instep serve`, and a user's
        (tmp_path / "logs" / name).write_text("there")
    with run(tmp_path, use_tensorboard=False) as log:
        assert log.moved is None
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["engine-0.log", "out.txt"]


@pytest.mark.parametrize(
    "name",
    "actor-rank0.log critic-rank12.log engine-3.log engine-3-node1.log router.log router-ref.log gate.log gate-ref.log "
    "dump-4.txt error.txt notes.txt stdout.txt stderr.txt".split(),
)
def test_names_of_a_runs_own_logs(tmp_path: Path, name: str) -> None:
    with run(tmp_path, use_tensorboard=False):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / name).touch()
    assert (move_run_aside(tmp_path) / "logs" / name).exists() and not (tmp_path / "logs").exists()


def test_neither_a_resume_nor_the_report_keeps_all_rows_in_memory(tmp_path: Path) -> None:
    path, size = tmp_path / "samples.jsonl", 40 << 20
    rows = [{"rollout_id": n, "split": "train", "response": "x" * 100_000} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows for _ in range(size // 400_000)))
    tracemalloc.start()
    JsonLines(path, lambda row: row["rollout_id"] < 3).close()
    report = make_report(tmp_path).read_text()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.7 * size < path.stat().st_size < 0.8 * size and most < 6 << 20
    assert [report.count(f"train, rollout {n}<") for n in range(4)] == [2, 0, 2, 0]


@pytest.mark.parametrize("line", [b'{"st', b'{"a": "\xe4\xbd"}', b"[1]", b"\x00\x00", b"[" * 10_000])
def test_a_damaged_row_is_named_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(OutputError, match=r"line 2 of metrics\.jsonl is damaged") as caught:
        read_json_lines(path)
    assert str(path) in str(caught.value)


def test_a_kill_at_any_byte_of_a_row_leaves_a_file_that_a_resume_reads(tmp_path: Path) -> None:
    """Cut inside a character, too: a row is there when its newline is."""
    whole = json.dumps({"rollout_id": 1, "prompt": "\u4f60\u597d \U0001f600"}, ensure_ascii=False).encode() + b"\n"
    path = tmp_path / "samples.jsonl"
    for size in range(len(whole) + 1):
        path.write_bytes(b'{"rollout_id": 0}\n' + whole[:size])
        JsonLines(path, lambda row: row["rollout_id"] < 2).close()
        assert len(read_json_lines(path)) == (2 if size == len(whole) else 1)


@pytest.mark.parametrize("cut", [b"", b'{"a', b"x" * 200_000], ids=["whole", "short", "long"])
def test_a_damaged_timeline_refuses_no_resume(tmp_path: Path, cut: bytes) -> None:
    whole, path = b'{"phase": "start"}\n{damaged}\n', tmp_path / "timeline.jsonl"
    for there in (whole, b""):
        path.write_bytes(there + cut)
        with run(tmp_path, resume_from_step=1, use_tensorboard=False) as log:
            log.note({"time": 1.0})
        assert path.read_bytes() == there + b'{"time": 1.0}\n'


def test_samples_are_spread_over_groups_and_the_extreme_ones_are_among_them(tmp_path: Path) -> None:
    groups = make_groups(3, 4)
    groups[2][3].reward, groups[1][3].reward, groups[0][3].response_length = -1.0, 2.0, 31
    with run(tmp_path) as log:
        log.samples(6, groups, "eval", 5)
        log.samples(7, groups, "eval", 0)
    rows = read_json_lines(tmp_path / "samples.jsonl")
    spread, extremes = [(0, 0), (1, 4), (2, 8), (0, 1), (1, 5)], [(2, 11), (1, 7), (0, 3)]
    assert [(row["group_index"], row["index"]) for row in rows] == spread + extremes
    assert {(row["rollout_id"], row["split"], row["num_samples"]) for row in rows} == {(6, "eval", 12)}
    assert rows[0]["prompt"][0]["content"] == "0 + 0 < <b>?" and rows[0]["weight_versions"] == ["4"]


def test_write_json_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan, "b": Path("x"), "c": [Status.COMPLETED]})
    assert json.loads(path.read_text()) == {"a": None, "b": "x", "c": ["completed"]}
    recursive: dict = {}
    recursive["self"] = recursive
    with pytest.raises(RecursionError):
        write_json(path, recursive)
    assert json.loads(path.read_text())["b"] == "x"


def test_no_secret_is_saved(tmp_path: Path) -> None:
    args = {
        "wandb_key": "s3cret",
        "env": {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "OMP_NUM_THREADS": "2"},
        "items": [{"password": "s3cret"}],
        "label_key": "label",
        "apply_chat_template": True,
        "reward_key": "score",
        "num_token": 3,
    }
    clean = without_secrets(args)
    assert clean["env"] == {"OMP_NUM_THREADS": "2"} and clean["items"] == [{}]
    assert {"label_key", "reward_key", "num_token", "apply_chat_template"} <= set(clean)
    with run(tmp_path, args_dict=args) as log:
        log.log(0, {"train/loss": 1.0})
        log.finish({"eval_reward_after": 1.0})
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


# TensorBoard and W&B


def read_events(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        for step in range(4):
            log.log(step, {"train/loss": step / 4, "rollout/reward_mean": 1.0 - step})
        assert read_events(tmp_path / "tensorboard")[("train/loss", 3)] == 0.75  # flushed before closing
    time.sleep(1.1)  # the names of its files order sessions by the second, and within it by no number of digits
    with run(tmp_path, resume_from_step=2) as log:
        log.log(2, {"train/loss": 9.0})
    losses = {step: v for (tag, step), v in read_events(tmp_path / "tensorboard").items() if tag == "train/loss"}
    assert losses == {0: 0.0, 1: 0.25, 2: 9.0}
    with run(tmp_path) as log:
        log.log(0, {"train/loss": 5.0})
    assert read_events(tmp_path / "tensorboard") == {("train/loss", 0): 5.0}
    with run(tmp_path / "without", use_tensorboard=False) as log:
        log.log(0, {"train/loss": 5.0})
    assert not (tmp_path / "without" / "tensorboard").exists()


def test_tensorboard_writer_needs_no_torch() -> None:
    code = (
        "import sys, tempfile, pathlib\n"
        "from instep.observability.run_logger import RunLogger\n"
        "with RunLogger(pathlib.Path(tempfile.mkdtemp()), {}, title='t', num_steps=1) as log:\n"
        "    log.log(0, {'train/loss': 1.0})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    options = {"project": "step", "group": "night", "mode": "offline", "team": "crew", "run_id": "abc123"}
    with run(tmp_path / "run", wandb=options, args_dict={"lr": 0.125, "wandb_key": "s3cret"}) as log:
        assert log.wandb_run_id == "abc123"
        log.log(0, {"train/loss": 0.5})
        log.log(1, {"train/loss": math.nan, "rollout/reward_mean": 0.75})
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*-abc123/run-abc123.wandb"))
    assert len(files) == 1
    records, deadline = read_wandb(files[0]), time.monotonic() + 20
    while not any(r.WhichOneof("record_type") == "exit" for r in records) and time.monotonic() < deadline:
        time.sleep(0.01)  # wandb's own process writes the file some milliseconds after `finish` returned
        records = read_wandb(files[0])
    opened = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (opened.project, opened.run_group, opened.entity, opened.run_id) == ("step", "night", "crew", "abc123")
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert config["lr"] == 0.125 and "wandb_key" not in config
    history = [
        {(i.key or "/".join(i.nested_key)): i.value_json for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(h["step"], h["train/loss"]) for h in history] == [("0", "0.5"), ("1", "NaN")]
    assert history[1]["rollout/reward_mean"] == "0.75"
    for path in (tmp_path / "run").rglob("*"):
        data = b"" if path.is_dir() else path.read_bytes()
        assert b"s3cret" not in data and b"0123456789" * 4 not in data, path


def read_wandb(path: Path) -> list:
    """The records of an offline run's file: blocks of 32 KiB of chunks of crc (4 bytes), length (2), type (1), data.

    Types: 1 a whole record, 2 its first chunk, 3 a middle one, 4 the last.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records
