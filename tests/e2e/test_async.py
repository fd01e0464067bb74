"""`instep train-async`: rollouts beside the training, with exact versions, and a resume as if nothing had happened."""

from __future__ import annotations

import json
import random

import pytest

from tests.documented import undocumented
from tests.e2e.killing import Run, schedule
from tests.e2e.test_resume import LOOSE, SEED, arguments, exit_codes, kill_and_count, state, tensors

EXACT = ["--deterministic-mode", "--lr", "5e-3"]


def asynchronous(tiny, run_dir, backend, num_rollout, *more):
    return ["train-async", *arguments(tiny, run_dir, backend, num_rollout, *EXACT, *more)[1:]]


def rows_of(run_dir):
    """What samples.jsonl says about each sample, with the versions of its tokens."""
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def kill_and_compare(tiny, root, backend, num_rollout, plan, *more):
    """A run that is killed as `plan` says ends like one that nobody disturbs, bit for bit; returns the latter."""
    rng = random.Random(SEED)
    whole = Run(asynchronous(tiny, root / "whole", backend, num_rollout, *more), root / "whole")
    assert whole.finish().exit_code == 0, whole.sessions[0].stderr[-3000:]
    victim = Run(asynchronous(tiny, root / "killed", backend, num_rollout, *more), root / "killed")
    for phase, way in plan:
        assert victim.kill(rng, phase, way).exit_code != 0
    assert victim.finish().exit_code == 0, victim.sessions[-1].stderr[-3000:]
    assert exit_codes(victim) == (len(plan), 0)

    ours, theirs = tensors(victim.run_dir), tensors(whole.run_dir)
    assert ours.keys() == theirs.keys() and [n for n in ours if not ours[n].equal(theirs[n])] == []
    assert rows_of(victim.run_dir) == rows_of(whole.run_dir)
    before, after = state(whole, num_rollout), state(victim, num_rollout)
    assert after["ledger"] == before["ledger"] and after["data_source"] == before["data_source"]
    assert after["ledger"]["num_consumed"] == 4 * num_rollout and after["version"] == before["version"]
    return whole


@pytest.mark.slow
def test_one_step_ahead_resumes_exactly(tiny, tmp_path):
    run = kill_and_compare(tiny, tmp_path, "hf", 7, [("train", "tree"), ("sync", "engine")])
    assert trained_versions(run, 7) == one_step_ahead(7)


@pytest.mark.slow
def test_one_step_ahead_with_more_groups_than_it_trains_on_resumes_exactly(tiny, tmp_path):
    """Over-sampling, a filter, and a buffer of what was given back."""
    run = kill_and_compare(tiny, tmp_path, "hf", 7, [("train", "tree"), ("sync", "engine")], *LOOSE.split())
    assert state(run, 7)["ledger"]["dropped"] and trained_versions(run, 7).keys() == set(range(7))


@pytest.mark.slow
def test_one_step_ahead_with_fan_out_resumes_exactly(tiny, tmp_path):
    more = ["--custom-generate-function-path", "tests.e2e.fan_out.generate"]
    run = kill_and_compare(tiny, tmp_path, "hf", 4, [("train", "tree")], *more)
    assert trained_versions(run, 4) == one_step_ahead(4)
    train = [row for row in rows_of(run.run_dir) if row["split"] == "train"]
    assert len(train) == 4 * 4 * 6 and len({(row["group_index"], row["index"]) for row in train}) == 4 * 4 * 4


@pytest.mark.slow
def test_one_step_ahead_with_partial_rollouts_nothing_is_lost_or_trained_twice(tiny, tmp_path):
    """Without determinism, so that aborted responses go on in a later rollout."""
    plan = [("train", "tree"), ("sync", "engine"), ("save", "controller")]
    assert exit_codes(kill_and_count(tiny, tmp_path, 3, command="train-async", plan=plan)) == (3, 0)


def test_one_step_ahead_with_a_sync_after_every_second_rollout_and_before_an_evaluation(tiny, tmp_path):
    """Syncs come after rollouts 1 and 3, before the evaluation after 2, and before the checkpoint after 4."""
    more = ["--micro-batch-size", "4", "--update-weights-interval", "2", "--eval-interval", "3", "--save-interval", "5"]
    run = Run(asynchronous(tiny, tmp_path / "run", "hf", 5, *more), tmp_path / "run")
    assert run.finish().exit_code == 0, run.sessions[0].stderr[-3000:]
    versions = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}  # before rollout 0 the engines get version 1
    assert trained_versions(run, 5, versions) == {0: {("1",)}, 1: {("1",)}, 2: {("1",)}, 3: {("2",)}, 4: {("3",)}}
    rows = [row for row in rows_of(run.run_dir) if row["split"] != "train"]
    assert {(row["rollout_id"], *row["weight_versions"]) for row in rows} == {(0, "1"), (3, "3"), (5, "5")}


def one_step_ahead(num_rollout):
    """Rollout n + 1 is of the weights that train step n: one version older, and so is it after a kill."""
    return {i: {(str(max(1, i)),)} for i in range(num_rollout)}


def trained_versions(run, num_rollout, synced=None):
    """The versions of the samples that were trained on, by rollout.

    Args:
        synced: the version that the engines have after a step; None: there is a sync after each.
    """
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if "train/loss" in row}
    assert sorted(steps) == list(range(num_rollout))
    assert [steps[i]["async/staleness_ratio/1"] for i in range(1, num_rollout)] == [1.0] * (num_rollout - 1)
    assert steps[0]["async/staleness_max"] == 0
    versions = {i: row["sync/version"] for i, row in steps.items() if "sync/version" in row}
    assert versions == (synced or {i: i + 2 for i in range(num_rollout)})
    assert undocumented({name for row in rows for name in row}) == set()
    found = {}
    for row in rows_of(run.run_dir):
        if row["split"] == "train":
            found.setdefault(row["rollout_id"], set()).add(tuple(row["weight_versions"]))
    return found


@pytest.mark.parametrize("backend", ["hf", pytest.param("megatron", marks=pytest.mark.slow)])
def test_staleness_0_is_the_synchronous_run_bit_for_bit(tiny, tmp_path, backend):
    more = ["--micro-batch-size", "4", "--over-sampling-batch-size", "6"]
    more += ["--dynamic-sampling-filter-path", "tests.e2e.observed.two_of_three"]
    runs = {}
    for command, bound in (("train", []), ("train-async", ["--max-staleness", "0"])):
        words = asynchronous(tiny, tmp_path / command, backend, 2, *more, *bound)
        runs[command] = Run([command, *words[1:]], tmp_path / command)
        done = runs[command].finish()
        assert done.exit_code == 0, done.stderr[-3000:]
    ours, theirs = (tensors(run.run_dir) for run in runs.values())
    assert [n for n in ours if not ours[n].equal(theirs[n])] == []
    assert rows_of(tmp_path / "train") == rows_of(tmp_path / "train-async")
    before, after = (state(run, 2) for run in runs.values())
    assert all(before[name] == after[name] for name in ("ledger", "data_source", "version", "num_steps"))


@pytest.mark.parametrize(
    "backend, kills",
    [("hf", 1), *(pytest.param(backend, 20, marks=pytest.mark.slow) for backend in ("hf", "megatron"))],
)
def test_groups_ahead_resume_exactly_after_kills(tiny, tmp_path, backend, kills):
    ages = kills_of_groups(tiny, tmp_path, backend, kills)
    assert ages[:4] == [0, 1, 2, 2] and max(ages) == 2


def kills_of_groups(tiny, root, backend, kills):
    """The ages of what each step of the whole run has trained, which the killed one equals bit for bit."""
    more = ["--max-staleness", "2", "--dynamic-sampling-filter-path", "tests.e2e.observed.two_of_three"]
    more += ["--micro-batch-size", "4"]
    plan = schedule(random.Random(SEED + kills), kills)
    plan = [("train" if phase == "rollout" else phase, way) for phase, way in plan]  # groups are always generated
    whole = kill_and_compare(tiny, root, backend, 2 * kills + 2, plan, *more)
    rows = [json.loads(line) for line in (whole.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert state(whole, 2 * kills + 2)["ledger"]["dropped"]
    assert undocumented({name for row in rows for name in row}) == set()
    return [row["async/staleness_mean"] for row in rows if "train/loss" in row]


@pytest.mark.slow
def test_nothing_is_lost_or_trained_twice_without_determinism(tiny, tmp_path):
    num_rollout, kills = 11, [("train", "tree"), ("train", "engine"), ("sync", "worker"), ("save", "controller")]
    words = ["--max-staleness", "2", "--dynamic-sampling-filter-path", "tests.e2e.observed.two_of_three"]
    words = arguments(tiny, tmp_path / "run", "hf", num_rollout, "--lr", "5e-3", "--eval-interval", "2", *words)
    run, rng = Run(["train-async", *words[1:]], tmp_path / "run"), random.Random(SEED)
    for phase, way in kills:
        assert run.kill(rng, phase, way).exit_code != 0
    assert run.finish().exit_code == 0, run.sessions[-1].stderr[-3000:]
    rows = rows_of(run.run_dir)
    rounds = {}
    for row in rows:
        if row["split"] == "train":
            rounds.setdefault(row["rollout_id"], []).append(row["group_index"])
    trained = sorted(group for groups in rounds.values() for group in set(groups))
    assert (
        all(len(rounds[i]) == 16 for i in range(num_rollout)) and len(set(trained)) == len(trained) == 4 * num_rollout
    )
    ledger = state(run, num_rollout)["ledger"]
    dropped = {i for i in range(ledger["num_issued"]) if i not in trained and str(i) not in ledger["open"]}
    assert ledger["num_consumed"] == 4 * num_rollout and len(dropped) == sum(ledger["dropped"].values())
    assert ledger["dropped"].keys() == {"filtered:two_of_three"} and max(trained) < ledger["num_issued"]
    evaluated = {row["rollout_id"] for row in rows if row["split"] == "eval/held-out"}
    assert len(evaluated) >= num_rollout // 2
