"""The simulator of `benchmarks/async.py` against closed forms, and against what was measured on a CPU."""

import argparse
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest

from instep.arguments.parse import parse

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from async_simulator import AHEAD, IN_TURNS, Rates, fit_engine, samples_per_s  # noqa: E402
from length_law import length  # noqa: E402

BATCH, SIZE, ROUNDS, LENGTH, PROMPT = 4, 8, 12, 100, 16
GROUPS = [[LENGTH] * SIZE] * (BATCH * ROUNDS)
SAMPLES = BATCH * SIZE
RATES = Rates(step=0.002, running=1e-4, train=1e-4, sync=0.1, other=0.05, first=0.04)
ROLLOUT = LENGTH * (RATES.step + RATES.running * SAMPLES) + RATES.first
TRAIN = SAMPLES * (LENGTH + PROMPT) * RATES.train
REST = RATES.sync + RATES.other


def simulate(schedule, rates=RATES, groups=GROUPS, **more):
    return samples_per_s(groups, BATCH, schedule, rates, prompt=PROMPT, **more)


def test_of_constant_lengths_a_round_in_turns_is_the_sum_of_its_parts():
    assert simulate(IN_TURNS) == pytest.approx(SAMPLES / (ROLLOUT + TRAIN + REST))
    few = Rates(step=0.002, running=0.0, train=1e-4, sync=0.1, most_running=SAMPLES // 4)
    one = 4 * LENGTH * few.step + TRAIN + few.sync  # they decode a quarter at a time
    assert simulate(IN_TURNS, few) == pytest.approx(SAMPLES / one)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_step_ahead_a_round_takes_as_long_as_the_slower_side(factor):
    rates = Rates(RATES.step, RATES.running, RATES.train * factor, RATES.sync, RATES.other, RATES.first)
    train, slower = TRAIN * factor, max(ROLLOUT, TRAIN * factor)
    whole = ROLLOUT + (ROUNDS - 1) * (slower + REST) + train + REST  # the last round trains alone
    assert simulate(AHEAD, rates) == pytest.approx(ROUNDS * SAMPLES / whole)


def test_two_that_keep_a_card_busy_gain_nothing_by_sharing_it():
    at_once = replace(RATES, first=0.0)  # a request on its way does not keep the card busy
    assert simulate(AHEAD, at_once, slow=2.0) == pytest.approx(simulate(IN_TURNS, at_once))
    assert simulate(IN_TURNS, slow=2.0) == pytest.approx(simulate(IN_TURNS))
    assert simulate(IN_TURNS) < simulate(AHEAD, slow=1.3) < simulate(AHEAD)


def test_with_staleness_the_trainer_never_waits_for_a_fast_engine():
    rates = Rates(step=1e-5, running=0.0, train=RATES.train, sync=0.1, other=0.05)
    assert simulate(1, rates, skipped=1) == pytest.approx(SAMPLES / (TRAIN + REST))


def test_with_staleness_a_fast_trainer_lets_the_engine_run_all_it_may():
    """Without other costs a decode step takes 1 s, every response 100, and N + 1 rounds are open at a time."""
    rates = Rates(step=1.0, running=0.0, train=0.0, sync=0.0)
    reached = {bound: simulate(bound, rates) for bound in (1, 2)}
    assert simulate(IN_TURNS, rates) == pytest.approx(SAMPLES / LENGTH)
    for bound, rate in reached.items():
        waves = -(-ROUNDS // (bound + 1))
        assert rate == pytest.approx(ROUNDS * SAMPLES / (waves * LENGTH))


def test_long_tails_gain_more_by_groups_than_by_rounds():
    groups = [[length(f"p{i}", n) for n in range(SIZE)] for i in range(BATCH * 30)]
    rates = Rates(step=0.002, running=1e-6, train=3e-5, sync=0.02, first=0.1)
    slow, ahead, stream = (simulate(s, rates, groups, skipped=3) for s in (IN_TURNS, AHEAD, 2))
    assert slow < ahead < stream


def test_the_rates_of_an_engine_are_found_in_the_ends_of_its_responses():
    lengths = [5, 9, 30], [7, 7]
    rounds = [[(n, 0.1 + 0.002 * n + 1e-5 * sum(min(m, n) for m in each)) for n in each] for each in lengths]
    assert fit_engine(rounds) == pytest.approx((0.1, 0.002, 1e-5))
    constant = [[(10, 1.0), (20, 1.1), (20, 1.0)]]
    assert min(fit_engine(constant)) >= 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_was_measured_on_a_cpu_is_near_the_simulators_bound(share):
    """Whatever share of the seconds of a rollout in turns its decode steps take without their requests."""
    found = json.loads((BENCHMARKS / "results" / "async-cpu.json").read_text())
    work, rows = found["workload"], {(row["mode"], row["seed"]): row for row in found["rows"]}
    groups = [[length(f"p{i}", n) for n in range(8)] for i in range(work["prompts"] * work["rollouts"])]
    rounds = [sum(groups[i : i + work["prompts"]], []) for i in range(0, len(groups), work["prompts"])]
    longest, tokens = mean(map(max, rounds)), mean(map(sum, rounds))
    ratios = []
    for seed in {seed for _, seed in rows}:
        slow = rows[IN_TURNS, seed]
        rollout, train = slow["rollout_s"], slow["train_s"] / (tokens + 16 * len(rounds[0]))
        rates = Rates(share * rollout / longest, (1 - share) * rollout / tokens, train, slow["sync_s"])
        more = {"prompt": 16, "skipped": work["skipped"]}
        reached = [samples_per_s(groups, work["prompts"], s, rates, **more) for s in (IN_TURNS, AHEAD)]
        assert reached[0] == pytest.approx(slow["samples_per_s"], rel=0.05)
        ratios.append(rows[AHEAD, seed]["samples_per_s"] / reached[1])
    assert 0.8 < median(ratios) < 1.0


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_commands_for_gpus_are_ones_of_instep(tmp_path, monkeypatch, num_gpus):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("async")
    monkeypatch.setattr(benchmark, "num_gpus", lambda: num_gpus)
    given = argparse.Namespace(device="cuda", rollout_backend="vllm", size="tiny", rollouts=10, prompts=8, more="")
    make = [sys.executable, str(BENCHMARKS / "random_model.py"), "tiny", str(tmp_path / "model")]
    subprocess.run(make, check=True)
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "w3 w4"}\n')
    for mode in benchmark.MODES:
        _, _, _, name, *flags = benchmark.command(given, tmp_path, mode, 0)
        args = parse(flags, name)
        assert (args.colocate, args.offload_train, args.offload_rollout) == (num_gpus == 1, False, False)
        assert args.device == "cuda" and args.rollout_backend == "vllm" and args.rollout_num_gpus == 1


def test_the_bound_and_what_is_reached_of_it_are_the_last_lines(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("async")
    found = json.loads((BENCHMARKS / "results" / "async-cpu.json").read_text())
    given = argparse.Namespace(device="cpu", rollout_backend="embedded", size=None, rollouts=20, prompts=16, more="")
    late = {"mode": "2 versions", "seed": 3, "error": "no time was left", "log": []}
    result = benchmark.report(given, [*found["rows"], late])
    assert result["headline"] == pytest.approx(found["headline"])
    benchmark.show(result)
    *_, ahead, behind, most, last = capsys.readouterr().out.splitlines()
    assert "bound is 1.58 times the" in ahead and ahead.endswith("; 1.57 times are reached, 99% of it")
    assert (
        behind.startswith("2 versions: ") and most.startswith("4 versions: ") and json.loads(last) == result["headline"]
    )
    synchronous = [row for row in found["rows"] if row["mode"] in (IN_TURNS, "synchronous")]
    benchmark.show(benchmark.report(given, synchronous))  # the others were not in time
    assert capsys.readouterr().out.splitlines()[-2].endswith("; not measured")
