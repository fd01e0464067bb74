"""The report of a run, from its rows of metrics."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from instep.observability.metrics import rollout_metrics
from instep.observability.plots import (
    COLORS,
    PLOTS,
    phase_seconds,
    read_history,
)
from instep.observability.report import fragment, headline, make_report
from tests.logged_run import HOSTILE, make_groups, run, unfinished_run


def test_the_history_counts_as_the_run_does() -> None:
    rows = [
        {"step": 0, "eval/a/reward_mean": 0.1},
        {"step": 0, "rollout/reward_mean": 0.2},
        {"step": 0, "train/loss": 1.0},
        {"step": 0, "perf/step_seconds": 5.0},
        {"step": 1, "rollout/reward_mean": None, "eval/a/reward_mean": 0.3},
    ]
    history = read_history(rows)
    assert history.column("eval/a/reward_mean") == ([0, 1], [0.1, 0.3])
    assert history.column("rollout/reward_mean") == ([0], [0.2])
    assert history.column("train/loss") == ([0], [1.0]) and history.column("perf/step_seconds") == ([0], [5.0])


def test_phase_seconds_of_history_add_up_to_the_step() -> None:
    rows = [
        {
            "step": i,
            "train/loss": 0.0,
            "perf/step_seconds": 10.0,
            "perf/train_seconds": 3.0,
            "perf/rollout_seconds": 5.0,
        }
        for i in range(3)
    ]
    rows[1]["perf/eval_seconds"] = 1.0
    phases = phase_seconds(read_history(rows))
    assert list(phases) == ["rollout", "train", "eval", "other"]
    assert phases["eval"] == [0.0, 1.0, 0.0] and phases["other"] == [2.0, 1.0, 2.0]


def test_report_of_a_full_run(tmp_path: Path) -> None:
    with run(tmp_path, args_dict={"hf_checkpoint": "model", "wandb_key": "s3cret"}) as log:
        log.log(0, {"eval/arith/reward_mean": 0.4})
        for step in range(4):
            metrics = rollout_metrics(make_groups(seed=step))
            metrics |= {"train/loss": 0.1, "train/grad_norm": 2.0, "train/lr": 1e-4, "train/pg_clipfrac": 0.01}
            metrics |= {"train/entropy": 1.0, "train/ppo_kl": 0.1, "train/log_prob_gap_mean": 2e-6 * (step + 1)}
            metrics |= {"critic/value_loss": 0.5 / (step + 1), "critic/explained_variance": 0.2 * step}
            metrics |= {"perf/rollout_seconds": 2.0, "perf/rollout_tokens_per_second": 100.0, "perf/pss_bytes": 1e9}
            metrics |= {"perf/trainer_idle_ratio": 0.25, "perf/engine_idle_ratio": 0.5, "async/queue_length": 3.0}
            metrics |= {"async/staleness_ratio/0": 0.25, "async/staleness_ratio/1": 0.75}
            metrics |= {"memory/rollout/others_bytes": 6e10, "memory/train/others_bytes": 1e9}
            log.log(step, metrics)
            log.samples(step, make_groups(seed=step), "train", 3)
        log.finish({"eval_reward_before": 0.4, "eval_reward_after": 0.95, "wall_seconds": 125.0, "num_steps": 4})
    text = (tmp_path / "report.html").read_text()
    without_rewards = ("pairs", "tokens")
    assert text.count("data:image/svg+xml;base64,") == len(PLOTS) - len(without_rewards)
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "<script" not in text  # self-contained
    for shown in (
        "0.400 \u2192 0.950",
        "arith: reward, before",
        "02:05",
        "8.0e-06",
        "hf_checkpoint",
        "finished, 4 rollouts logged",
    ):
        assert shown in text, shown
    assert "0 + 0 &lt; &lt;b&gt;?" in text and "<b>?" not in text  # escaped
    assert "train, rollout 0" in text and "train, rollout 3" in text and "train, rollout 1" not in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "train/loss": 0.5}],
        [{"step": 0, "rollout/reward_mean": 0.5, "train/log_prob_gap_max": None, "train/engine_kl": 0.0}],
        [{"step": 5, "eval/a/reward_mean": None}],
        [{"step": s, "train/loss": 1.0, f"async/staleness_ratio/{s % 3}": 1.0} for s in range(150)],
        [{"step": s, "train/loss": 1.0, "perf/train_seconds": 0.0, "perf/x_seconds": 1.0} for s in range(300)],
    ],
    ids=["nothing", "one step", "gaps", "null eval", "many ages", "long"],
)
def test_report_of_a_poor_run(tmp_path: Path, rows: list[dict]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = make_report(tmp_path)
    text = path.read_text()
    assert text.rstrip().endswith("</html>") and "not finished" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_headline_says_when_the_gap_is_not_available() -> None:
    history = read_history([{"step": 0, "train/loss": 0.1, "train/log_prob_gap_mean": None}])
    assert ("log-prob gap to the engine", "not available") in headline(history, {})


def test_no_color_stands_for_two_things() -> None:
    length = {"rollout/response_length_mean": 5.0, "rollout/response_length_max": 9.0, "rollout/truncated_ratio": 0.5}
    svg = PLOTS["length"](read_history([{"step": s, **length} for s in range(3)]))
    assert svg is not None and all(f"stroke: {color}" in svg for color in COLORS[:3])
    rewards = {f"eval/set {i}/reward_mean": 0.1 * i for i in range(12)}
    svg = PLOTS["reward"](read_history([{"step": s, "rollout/reward_mean": 0.5, **rewards} for s in range(3)]))
    drawn = set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.2", svg or ""))
    assert len(drawn) == 12 and COLORS[0] not in drawn
    ages = {f"async/staleness_ratio/{age}": 0.1 for age in range(10)}
    svg = PLOTS["staleness"](read_history([{"step": 0, "train/loss": 1.0, **ages}]))
    assert len(set(re.findall(r"fill: (#[0-9a-f]{6})", svg or "")) - {"#ffffff", "#27303f"}) >= 10


@pytest.mark.parametrize(("number", "joined"), [(2, False), (3, True)])
def test_two_evaluations_are_points(number: int, joined: bool) -> None:
    svg = PLOTS["reward"](read_history([{"step": s, "eval/a/reward_mean": 0.1 * s} for s in range(number)]))
    assert ("stroke-dasharray" in (svg or "")) == joined and f"fill: {COLORS[1]}" in (svg or "")


def test_a_name_that_the_font_lacks_is_left_out_of_plots() -> None:
    rows = [{"step": s, "eval/\u6570\u5b66/reward_mean": 0.5, "eval/easy/reward_mean": 0.5} for s in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PLOTS["reward"](read_history(rows)) is not None
    assert ("eval \u6570\u5b66, first \u2192 last", "0.500 \u2192 0.500") in headline(read_history(rows), {})


def test_alarms_come_with_their_advice_and_texts_are_escaped(tmp_path: Path) -> None:
    unfinished_run(tmp_path)
    page, shown = make_report(tmp_path).read_text(), fragment(tmp_path)
    assert "<td>rollout 4</td><td><b>truncation</b></td><td>60% of the responses are cut off; try" in page
    assert shown.count("data:image/svg+xml;base64,") >= 4 and "training reward, first" in shown
    for text in page, shown:
        assert HOSTILE not in text and "<script" not in text and "&lt;img" in text
