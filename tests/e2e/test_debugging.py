"""Parts of a run alone, dumps and their replay, SIGUSR1, the trial of hooks: on small runs, as a user has them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from statistics import fmean

import pytest
import torch

from instep.controller.dumps import load_rollout
from instep.errors import CheckpointError
from instep.observability.sinks import read_json_lines
from tests.e2e import commands
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, run, start
from tests.e2e.test_endings import LONG, in_rollout, wait_for


def rows(run_dir, name="metrics.jsonl"):
    return read_json_lines(run_dir / name)


def steps(run_dir):
    return [row for row in rows(run_dir) if "train/loss" in row]


def instep(*words):
    command = [sys.executable, "-m", "instep.cli", *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def dumped(tiny, tmp_path_factory):
    """A run of 2 rollouts, 2 steps each, with all dumps. The reward is random, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("dumped")
    more = ["--dump-details", str(folder / "dump"), "--rm-type", "random", "--num-steps-per-rollout", "2"]
    more += ["--eval-prompt-data", "held-out", str(tiny / "eval.jsonl"), "--eval-interval", "2"]
    done = run(grpo_arguments(tiny, folder, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_dumps_hold_what_was_generated_and_trained_on(dumped):
    names = sorted(p.relative_to(dumped / "dump").as_posix() for p in (dumped / "dump").rglob("*.pt"))
    assert names == [
        "rollout_data/0.pt",
        "rollout_data/1.pt",
        "rollout_data/eval_0.pt",
        "rollout_data/eval_2.pt",
        "train_data/0_0.pt",
        "train_data/1_0.pt",
    ]
    samples = torch.load(dumped / "dump/rollout_data/1.pt", weights_only=True)["samples"]
    data = torch.load(dumped / "dump/train_data/1_0.pt", weights_only=True)["rollout_data"]
    assert len(samples) == 16 and sorted(set(data["step"])) == [0, 1]
    for i, sample in enumerate(samples):
        assert data["tokens"][i].tolist() == sample["tokens"]
        n = sample["response_length"]
        assert len(data["advantages"][i]) == len(data["train_log_probs"][i]) == n
        assert torch.allclose(data["train_log_probs"][i], torch.tensor(sample["rollout_log_probs"]), atol=1e-4)
    means = [0.0, 0.0]  # of the two steps
    for step, weights, entropies in zip(data["step"], data["loss_weights"], data["entropy"], strict=True):
        means[step] += float(weights @ entropies)
    assert fmean(means) == pytest.approx(steps(dumped)[1]["train/entropy"], rel=1e-5)
    assert (dumped / "dump/tokenizer/tokenizer.json").exists()


def test_a_replay_trains_as_the_run_did_without_an_engine(dumped, tiny, tmp_path):
    template = str(dumped / "dump/rollout_data/{rollout_id}.pt")
    more = ["--load-debug-rollout-data", template, "--num-steps-per-rollout", "2"]
    done = run(grpo_arguments(tiny, tmp_path / "whole", *more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list((tmp_path / "whole" / "logs").glob("engine*"))
    for ours, theirs in zip(steps(tmp_path / "whole"), steps(dumped), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "rollout/reward_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert steps(dumped)[-1]["train/grad_norm"] > 0
    assert [len(g) for g in load_rollout(template.replace("{rollout_id}", "0"), 0.5).samples] == [4, 4]


def test_rollouts_alone_start_no_trainer(dumped, tiny, tmp_path):
    """The same seeds and weights give the same first rollout; a later one is sampled from weights that never move."""
    more = ["--debug-rollout-only", "--rm-type", "random"]
    more += ["--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"), "--num-rollout", "1"]
    done = run(grpo_arguments(tiny, tmp_path, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["engine-0.log"]
    alone, beside = load_rollout(tmp_path / "0.pt"), load_rollout(dumped / "dump/rollout_data/0.pt")
    assert [s.tokens for g in alone.samples for s in g] == [s.tokens for g in beside.samples for s in g]
    assert len(rows(tmp_path, "samples.jsonl")) == 8 and not steps(tmp_path)
    ledger = json.loads((tmp_path / "summary.json").read_text())["ledger"]
    assert (ledger["num_issued"], ledger["num_consumed"]) == (4, 4)  # though nothing was trained on them


@pytest.mark.parametrize(
    "more, words",
    [
        (["--debug-train-only"], ["needs an engine", "--load-debug-rollout-data"]),
        (["--debug-rollout-only", "--debug-train-only"], ["nothing would be left to run"]),
        (["--debug-rollout-only", "--save", "x"], ["has no trainer"]),
        (["--load-debug-rollout-data", "nowhere/{rollout_id}.pt"], ["no file nowhere/0.pt"]),
        (["--save-debug-rollout-data", "one.pt"], ["one file for all rollouts", "{rollout_id}"]),
        (["--save-debug-rollout-data", "{step}.pt"], ["another field than {rollout_id}"]),
    ],
)
def test_flags_that_contradict_each_other(tiny, tmp_path, more, words, capsys):
    from instep.cli import main

    assert main(grpo_arguments(tiny, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_a_damaged_dump_is_named(dumped, tmp_path):
    whole = (dumped / "dump/rollout_data/0.pt").read_bytes()
    for content in (b"no dump", whole[: len(whole) // 2], b""):
        (tmp_path / "0.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be replayed") as error:
            load_rollout(tmp_path / "0.pt")
        assert error.value.where == str(tmp_path / "0.pt")


def test_the_timeline_has_phases_requests_and_processes(dumped):
    timeline = rows(dumped, "timeline.jsonl")
    ended = {(row["phase"], row["began"]) for row in timeline if "ended" in row}
    assert {row["phase"] for row in timeline if "phase" in row} == {
        "start",
        "sync",
        "eval",
        "rollout",
        "train",
        "report",
    }
    assert {(row["phase"], row["began"]) for row in timeline if "phase" in row} == ended
    first, last = (row for row in timeline if "processes" in row)
    processes = [{row["name"]: row for row in step["processes"]} for step in (first, last)]
    assert processes[0].keys() == {"controller", "engine 0", "actor rank 0"}
    assert all(row["host_bytes"] > 1e7 for step in processes for row in step.values())
    before, after = (step["engine 0"]["num_generated"] for step in processes)
    of_round = sum(row["response_length"] for row in rows(dumped, "samples.jsonl") if row["rollout_id"] == 1)
    assert after - before >= of_round > 0
    assert max(number for row in timeline for _, number in row.get("requests", [])) > 1


def test_samples_of_a_run_have_masks_gaps_and_versions(dumped):
    logged = rows(dumped, "samples.jsonl")
    trained = [row for row in logged if row["split"] == "train"]
    assert len(trained) == 16 and {row["split"] for row in logged} == {"train", "eval/held-out"}
    for row in trained:
        tokens, n = row["tokens"], row["response_length"]
        assert [len(tokens[k]) for k in tokens] == [n] * 6 and set(tokens["loss_mask"]) == {1}
        assert "".join(tokens["texts"]).startswith(row["response"])  # the text leaves out the token that ends it
        assert max(abs(a - b) for a, b in zip(tokens["log_probs"], tokens["rollout_log_probs"], strict=True)) < 1e-4
        assert row["version_spans"] == [[str(row["rollout_id"] + 1), 0, n]]
    assert all(len(row["tokens"]["entropies"]) == row["response_length"] for row in trained)
    done = instep("samples", dumped, "--worst", "reward", "--limit", 1, "--tokens")
    assert done.returncode == 0 and done.stdout.count("== train 1, group ") == 1
    assert "reward 0.000" in done.stdout and "versions 2" in done.stdout and "largest gaps" in done.stdout


def test_doctor_of_a_run(dumped):
    done = instep("doctor", dumped)
    assert done.returncode == 0, done.stdout
    assert "finished after" in done.stdout and "8 groups issued, 8 consumed" in done.stdout


def test_sigusr1_writes_stacks_and_queues_and_the_run_goes_on(tiny, tmp_path):
    process = start(grpo_arguments(tiny, tmp_path, *LONG))
    wait_for(in_rollout(tmp_path), 240, process)
    for number in (0, 1):
        process.send_signal(signal.SIGUSR1)
        path = tmp_path / "logs" / f"dump-{number}.txt"
        wait_for(lambda: path.exists() and "Stacks of actor rank 0" in path.read_text(), 20, process)  # noqa: B023
    before = len(steps(tmp_path))
    wait_for(lambda: len(steps(tmp_path)) > before, 20, process)
    doctor = instep("doctor", tmp_path)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert f"stacks and queues of all processes are in {tmp_path}/logs/dump-1.txt" in stdout + stderr
    text = path.read_text()
    sections = re.findall(r"^==== (.*)$", text, re.M)
    assert sections[:4] == ["Queues", "Threads of the controller", "Tasks of the rollout loop", "Processes"]
    assert {s.split(" (")[0] for s in sections[4:] if s.startswith("Stacks")} >= {
        "Stacks of engine 0",
        "Stacks of actor rank 0",
    }
    assert re.search(r"ledger: .*'num_issued': \d+.*'num_outstanding': \d+", text)
    assert "train_sync.py" in text and "worker_main.py" in text and "/is_paused" in text
    assert f"running as pid {process.pid}" in doctor.stdout


@pytest.mark.slow
def test_sigusr1_while_the_run_starts_does_not_end_it(tiny, tmp_path):
    process = start(grpo_arguments(tiny, tmp_path, "--num-rollout", "1"))
    time.sleep(1.0)  # torch is being imported
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr[-3000:]


HOOKS = """\
import time

async def raises(args, sample, *more):
    answer = sample.metadata["no such key"]
    return answer

def filter_raises(args, group):
    return group[0].reward / 0

async def wrong_type(args, sample):
    return "great"

async def generates_nothing(args, sample, params):
    return []

async def asks_the_engine(args, sample):
    from instep.rollout.http import post
    out = await post(f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate",
                     {"token_ids": sample.tokens, "sampling_params": {"max_tokens": 1}})
    return float(len(out))

async def counts(args, sample):
    with open("calls", "a") as file:
        file.write(f"{sample.index} {sample.response!r}\\n")
    return float(sample.index % 2)
"""


def with_hooks(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    monkeypatch.setitem(commands.ENVIRONMENT, "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--custom-rm-path", "my_hooks.raises"], ["KeyError('no such key')", "my_hooks.py:4 in raises"]),
        pytest.param(
            ["--custom-rm-path", "my_hooks.wrong_type"], ["my_hooks.wrong_type", "great"], marks=pytest.mark.slow
        ),
        (
            ["--dynamic-sampling-filter-path", "my_hooks.filter_raises"],
            ["ZeroDivisionError", "my_hooks.py:8 in filter_raises"],
        ),
        pytest.param(
            ["--rollout-sample-hook-path", "my_hooks.raises"],
            ["KeyError", "my_hooks.py:4 in raises"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bad_hook_is_found_before_anything_starts(tiny, tmp_path, monkeypatch, more, words):
    with_hooks(tmp_path, monkeypatch)
    (tmp_path / "run").mkdir()
    earlier = {"config.json": '{"args": {}, "versions": {}}', "metrics.jsonl": '{"step": 0}\n', "summary.json": "{}"}
    for name, text in earlier.items():  # of a run before, which a start that fails leaves as it is
        (tmp_path / "run" / name).write_text(text)
    done = run(grpo_arguments(tiny, tmp_path / "run", *more))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert {p.name: p.read_text() for p in (tmp_path / "run").iterdir() if p.name != ".lock"} == earlier
    assert all(word in done.stderr for word in [*words, "the run has not begun", "train.jsonl"]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, word", [("raises", "my_hooks.py:4 in raises"), ("generates_nothing", "no sample")])
def test_a_bad_generate_function_is_found_before_the_first_rollout(tiny, tmp_path, monkeypatch, name, word):
    with_hooks(tmp_path, monkeypatch)
    more = ["--custom-generate-function-path", f"my_hooks.{name}"]
    done = run(grpo_arguments(tiny, tmp_path / "run", *more))
    assert done.returncode == 1 and "the run has not begun" in done.stderr and word in done.stderr, done.stderr
    assert not rows(tmp_path / "run") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_trial_leaves_no_trace_in_the_run(tiny, tmp_path, monkeypatch):
    """Two calls on each of four prompts more, with and without the end-of-turn token, and the same run."""
    with_hooks(tmp_path, monkeypatch)
    losses, calls = [], []
    for name, more in (("with", []), ("without", ["--no-hook-trial"])):
        done = run(grpo_arguments(tiny, tmp_path / name, "--custom-rm-path", "my_hooks.counts", *more))
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([row["train/loss"] for row in steps(tmp_path / name)])
        calls.append((tmp_path / "calls").read_text().splitlines())
        (tmp_path / "calls").unlink()
    assert losses[0] == losses[1]
    assert len(calls[0]) == 8 + 32 and len(calls[1]) == 32
    labels = [json.loads(line)["label"] for line in (tiny / "train.jsonl").read_text().splitlines()[:4]]
    responses = [repr(label + end) for label in labels for end in ("", "<|im_end|>")]
    assert sorted(call.split()[1] for call in calls[0][:8]) == sorted(responses)


@pytest.mark.slow
def test_a_reward_that_asks_the_engine_is_tried_when_it_is_there(tiny, tmp_path, monkeypatch):
    with_hooks(tmp_path, monkeypatch)
    done = run(grpo_arguments(tiny, tmp_path / "run", "--custom-rm-path", "my_hooks.asks_the_engine"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_an_alarm_is_told_at_once_in_the_table_and_in_the_metrics(tiny, tmp_path):
    """Responses of 2 tokens are all cut off."""
    more = ["--rollout-max-response-len", "2", "--num-rollout", "4", "--alarm-zero-std-ratio", "1"]
    done = run(grpo_arguments(tiny, tmp_path, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("alarm truncation: ") == 1 and "--rollout-max-response-len" in said
    assert re.search(r"alarms +│? *\S* *truncation \(rollout 2\)", said), said[-2000:]
    assert [row["alarm/truncation"] for row in steps(tmp_path)] == [0, 0, 1, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"] == {"truncation": 2}
    assert "truncation (rollout 2)" in (tmp_path / "report.html").read_text()
