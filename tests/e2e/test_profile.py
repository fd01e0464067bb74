"""`instep profile` on a tiny model: the timeline of one step, with all processes on one clock, and its table."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from instep.cli import main
from instep.rollout.vllm_rollout import generate
from instep.types import Sample
from tests.e2e.commands import grpo_arguments, on_vllm

REQUIRED = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "ph", "pid", "tid", "args"}}


pytestmark = pytest.mark.usefixtures("no_plots")


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """What a file says of itself, and its spans by the name of the process; its form is that of trace events."""
    with gzip.open(path) as file:
        trace = json.load(file)
    names, rows, spans = {}, set(), []
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            rows.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            spans.append(event)
    about, of = trace["otherData"], {name: [s for s in spans if names[s["pid"]] == name] for name in names.values()}
    assert len(names) == len(of) and {(s["pid"], s["tid"]) for s in spans} == rows
    for span in spans:
        assert 0 <= span["ts"] and 0 <= span["dur"] and span["ts"] + span["dur"] <= about["seconds"] * 1e6 + 1
    return about, of


def one(spans: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """When the only span of this name began and ended."""
    (span,) = (s for s in spans if s["name"] == name and s["cat"] == "instep")
    return span["ts"], span["ts"] + span["dur"]


def test_the_timeline_of_a_step_and_where_it_went(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--num-rollout", "50", "--save", str(tmp_path / "ckpt"), "--use-kl-loss", "--kl-loss-coef", "0.01"]
    flags += ["--micro-batch-size", "8"]
    assert main(["profile", *grpo_arguments(tiny, tmp_path / "run", *flags)[1:]]) == 0
    folder = tmp_path / "run-profile" / "profile"
    assert [p.name for p in sorted(folder.iterdir())] == ["step-2.trace.json.gz", "step-2.txt"]
    assert {p.name for p in tmp_path.iterdir()} == {"run-profile"}, "a profile keeps nothing of the run"
    about, of = read(folder / "step-2.trace.json.gz")
    assert set(of) == {"controller", "rollout", "actor rank 0", "engine 0"}

    counts = Counter(s["name"] for s in of["rollout"])
    assert counts == {"sample": 16, "turn": 16, "reward": 16}
    samples = [s["args"] for s in of["rollout"] if s["name"] == "sample"]
    assert len({s["index"] for s in samples}) == 16 and all(0 < s["tokens"] <= 16 for s in samples)

    rank, engine, controller = of["actor rank 0"], of["engine 0"], of["controller"]
    train, step = one(controller, "train"), one(rank, "train")
    assert train[0] < step[0] < step[1] < train[1], "a rank's call lies in the controller's phase, on its clock"
    forward = one([s for s in rank if s["ts"] > step[0]], "forward_backward")  # earlier ones are in the rollout
    products = [s["ts"] for s in rank if s["name"] == "aten::mm"]
    assert step[0] < forward[0] < forward[1] < one(rank, "optimizer_step")[0] and len(products) > 20
    assert sum(forward[0] < t < forward[1] for t in products) > 10, "torch's events are on the clock, too"
    requests = [s for s in engine if s["name"] == "request" and s["args"]["tokens"] > 1]
    assert sorted(r["args"]["tokens"] for r in requests) == sorted(s["tokens"] for s in samples if s["tokens"] > 1)
    rollout = one(controller, "rollout")
    assert all(rollout[0] < r["ts"] < r["ts"] + r["dur"] < rollout[1] for r in requests)
    decodes = [s for s in engine if s["name"] == "decode" and s["ts"] < rollout[1]]
    assert len(decodes) >= max(s["tokens"] for s in samples) - 1

    phases = {row["phase"]: row["seconds"] for row in about["table"] if not row["part"]}
    assert list(phases) == ["rollout", "train", "sync", ""] and min(phases.values()) > 0
    assert sum(phases.values()) == pytest.approx(about["seconds"], rel=1e-6)
    metrics = [json.loads(line) for line in (tmp_path / "run-profile" / "metrics.jsonl").read_text().splitlines()]
    for name in ("rollout", "train", "sync"):
        assert phases[name] == pytest.approx(metrics[-1][f"perf/{name}_seconds"], abs=0.02, rel=0.1)
    floors = {row["part"]: row for row in about["table"] if row["floor"]}
    early = {"log-probs": "perf/early_log_probs_seconds", "forward and backward": "perf/early_train_seconds"}
    late = {part for part, name in early.items() if not metrics[-1][name]}
    assert set(floors) == {"generate", "optimizer", "transfer"} | late
    assert all(row["seconds"] > row["floor"] > 0 for row in floors.values())
    printed = capsys.readouterr().out
    assert (folder / "step-2.txt").read_text().split("\n", 1)[1].strip() in printed and "ui.perfetto.dev" in printed


@pytest.mark.slow
def test_the_timeline_of_an_asynchronous_step_has_both_sides_at_work(tiny: Path, tmp_path: Path) -> None:
    flags = ["--num-rollout", "2", "--profile", "--profile-step-start", "0", "--profile-step-end", "1"]
    flags += ["--rollout-max-response-len", "64"]
    assert main(["train-async", *grpo_arguments(tiny, tmp_path / "run", *flags)[1:]]) == 0
    about, of = read(tmp_path / "run" / "profile" / "step-0.trace.json.gz")
    assert decodes_beside_training(of) > 3, "the engine makes rollout 1 while rollout 0 is trained"
    assert {"wait", "train", "sync"} <= {row["phase"] for row in about["table"]}


def decodes_beside_training(of: dict[str, list[dict[str, Any]]]) -> int:
    begun, ended = one(of["controller"], "train")
    return sum(begun < s["ts"] < ended for s in of["engine 0"] if s["name"] == "decode")


async def uneven(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Every other group is long, and still under way when the first round is taken."""
    limit = 600 if (sample.group_index or 0) % 2 else 8
    return await generate(args, sample, {**sampling_params, "max_new_tokens": limit, "ignore_eos": True})


@pytest.mark.slow
def test_the_timeline_of_groups_that_go_on_through_a_sync(long: Path, tmp_path: Path) -> None:
    flags = ["--num-rollout", "2", "--profile", "--profile-step-start", "0", "--profile-step-end", "1"]
    flags += ["--max-staleness", "1", "--custom-generate-function-path", f"{__name__}.uneven"]
    assert main(["train-async", *grpo_arguments(long, tmp_path / "run", *flags)[1:]]) == 0
    about, of = read(tmp_path / "run" / "profile" / "step-0.trace.json.gz")
    assert decodes_beside_training(of) > 3, "the engine makes groups of rollout 1 while rollout 0 is trained"
    assert {"wait", "train", "sync"} <= {row["phase"] for row in about["table"]}
    resumed = max(s["ts"] + s["dur"] for s in of["controller"] if s["name"] == "resume")
    assert any(s["ts"] > resumed for s in of["engine 0"] if s["name"] == "decode"), "and after the sync"


@pytest.mark.vllm
@pytest.mark.slow
def test_the_timeline_has_what_vllm_records_of_itself(small: Path, tmp_path: Path) -> None:
    words = grpo_arguments(small, tmp_path / "run", "--actor-num-gpus-per-node", "1", *on_vllm())
    assert main(["profile", *words[1:]]) == 0
    folder = tmp_path / "run-profile" / "profile"
    assert [p.name for p in sorted(folder.iterdir())] == ["step-2.trace.json.gz", "step-2.txt"]
    about, of = read(folder / "step-2.trace.json.gz")
    assert set(of) == {"controller", "rollout", "actor rank 0", "engine 0"}
    kinds = Counter(s["cat"] for s in of["engine 0"])
    assert kinds["cpu_op"] > 100 and kinds["instep"] > 3
    rollout = one(of["controller"], "rollout")
    steps = [s["ts"] for s in of["engine 0"] if s["name"].startswith("execute_")]
    longest = max(s["args"]["tokens"] for s in of["rollout"] if s["name"] == "turn")
    assert sum(rollout[0] < t < rollout[1] for t in steps) >= longest, "vLLM's own steps, on the clock of the run"
    assert about["table"][1]["part"] == "generate" and about["table"][1]["seconds"] > 0
