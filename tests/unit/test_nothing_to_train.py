"""`--num-rollout 0` and a run that is finished: evaluated or refused, and no figure of before is shown as new."""

from __future__ import annotations

import argparse

import pytest

from instep.arguments.parse import parse
from instep.controller.round_metrics import evaluation_summary
from instep.train_sync import evaluates_after, evaluates_at
from tests.command_line import argv, make_folder, refusal


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("skip", [True, False])
def test_what_trains_nothing_evaluates(start, interval, skip):
    args = argparse.Namespace(eval_interval=interval, skip_eval_before_train=skip)
    assert evaluates_at(args, start, 0) and evaluates_at(args, start, start)
    assert evaluates_at(args, 4, 3)  # --num-rollout below what the checkpoint covers


def test_an_evaluation_follows_every_last_rollout():
    args = argparse.Namespace(eval_interval=3, skip_eval_before_train=True)
    assert [evaluates_after(args, i, 5) for i in range(5)] == [False, False, True, False, True]
    assert not evaluates_at(args, 0, 5) and not evaluates_at(args, 4, 5) and evaluates_at(args, 3, 5)


@pytest.mark.parametrize("words", ["--eval-prompt-data data.jsonl", "--eval-function-path json.dumps"])
def test_without_an_interval_no_evaluation_runs(words):
    """As in slime, whose run-qwen3-235B-A22B.sh names data sets and no interval. A line says so."""
    args = parse(argv(words))
    assert not any(evaluates_at(args, i, 3) or evaluates_after(args, i, 3) for i in range(4))
    assert [n for n in args.notes if n.startswith("--eval-interval: is not given, so no evaluation runs")]
    assert not [n for n in parse(argv()).notes if "eval" in n]


def test_num_rollout_0_needs_no_interval():
    assert parse(argv("--num-rollout 0 --eval-prompt-data data.jsonl")).eval_interval == 1
    assert parse(argv("--num-rollout 0 --eval-prompt-data data.jsonl --eval-interval 7")).eval_interval == 7
    assert parse(argv("--num-rollout 0 --eval-function-path json.dumps")).eval_interval == 1
    assert parse(argv()).eval_interval is None


def test_num_rollout_0_without_an_evaluation_is_refused():
    assert "trains nothing, and there is nothing to evaluate on" in refusal("--num-rollout 0")
    assert "evaluates, but there is no engine" in refusal(
        "--num-rollout 0 --eval-prompt-data data.jsonl --debug-train-only --rollout-function-path json.dumps"
    )
    for command in ("sft", "dpo"):
        assert "trains nothing\n  where:  --num-rollout 0" in refusal(
            "--num-rollout 0", "--rm-type --label-key", command
        )


def test_no_figure_of_before_is_shown_as_new():
    rows = [{"rollout_id": 0.0, "eval/a/reward_mean": 0.25}, {"rollout_id": 4.0, "eval/a/reward_mean": 0.5}]
    assert evaluation_summary(rows, 4) == {
        "eval_reward_before": 0.25,
        "eval_reward_after": 0.5,
        "evaluations": rows,
    }
    assert evaluation_summary(rows, 6) == {"eval_reward_before": 0.25, "evaluations": rows}
    assert evaluation_summary(rows[1:], 6) == {"evaluations": rows[1:]} and evaluation_summary([], 6) == {}
    other = [rows[0], {"rollout_id": 6.0, "eval/b/reward_mean": 0.75}]  # the data set was changed on the way
    assert evaluation_summary(other, 6) == {"eval_reward_after": 0.75, "evaluations": other}
