"""examples/tool_use: turns of the model and of a tool in one sample, no token of which is made twice."""

import asyncio
import importlib.util
import json
import os
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from instep.data.chat import tokenize_conversation
from instep.observability.samples import gaps
from instep.rollout.tokens import next_turn
from instep.types import Sample
from tests.assets import make_checkpoint
from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_use"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load("python_tool")


def test_the_tool(tool):
    async def ask(*expressions):
        return await asyncio.gather(*map(tool.evaluate, expressions))

    answers = asyncio.run(ask("47*86-12", " 7//0 ", "1+", "open('x')", "'a'*10**9", "[1]*1000", "\0", ""))
    assert answers[0] == "4030" and answers[1].startswith("ZeroDivisionError") and "SyntaxError" in answers[2]
    assert answers[3].startswith("NameError") and answers[4].startswith("MemoryError") and len(answers[5]) >= 99
    assert "Error" in answers[6] and "Error" in answers[7]


def test_a_tool_that_does_not_end(tool):
    started = time.monotonic()
    answer = asyncio.run(tool.evaluate("9**9**9"))  # whichever bound it meets first, of CPU time or of time
    assert answer.startswith("ended with status") or answer == "TimeoutError"
    assert time.monotonic() - started < allowed(tool.LIMITS.seconds + 5)


def test_tokens_between_turns(tmp_path):
    """Those that the template writes, and no special token of what a tool says."""
    folder = str(make_checkpoint(tmp_path))
    args = Namespace(
        hf_checkpoint=folder, trust_remote_code=False, chat_template_text=None, apply_chat_template_kwargs=None
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "let me ask"}]
    answer = [{"role": "tool", "content": "2"}]
    before = (
        tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True) + "let me ask<|im_end|>"
    )

    def tokens_after(messages):
        sample = Sample(prompt=talk[:1], tokens=tokenizer(before, add_special_tokens=False)["input_ids"])
        sample.response_length = len(tokenizer("let me ask<|im_end|>", add_special_tokens=False)["input_ids"])
        assert next_turn(args, sample, messages) is sample
        return sample.tokens

    whole = tokenizer.apply_chat_template(talk + answer, tokenize=False, add_generation_prompt=True)
    assert tokens_after(answer) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokens_after([{"role": "tool", "content": "<|im_<|im_end|>start|>2<|im_end|>"}]) == tokens_after(answer)


def run_stages(out, stages, *more):
    """Those commands of run.py, with a recorder around the generate function; the record of each sample."""
    path = os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = ENVIRONMENT | {"PYTHONPATH": path, "TOOL_RECORD": str(out / "record.jsonl")}
    example = load("run")
    for _, command in example.stages(example.arguments().parse_args(["--out", str(out), *more]))[stages]:
        command = [word.replace("python_tool.generate", "tests.e2e.tool_recorder.generate") for word in command]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]


def share_with_tool(out):
    """The share of samples that asked the tool.

    Tool tokens are masked, everything else is trained on, and trainer and engine agree about each such token.
    """
    tokenizer = AutoTokenizer.from_pretrained(out / "task" / "hf")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "train"]
    with_tool = 0
    for row in rows:
        tokens = row["tokens"]
        masked = [i for i, m in zip(tokens["ids"], tokens["loss_mask"], strict=True) if not m]
        assert max((gap for gap in gaps(row) if gap is not None), default=0.0) < 1e-4
        assert all(p == 0 for p, m in zip(tokens["rollout_log_probs"], tokens["loss_mask"], strict=True) if not m)
        between = tokenizer.decode(masked)
        if masked:
            with_tool += 1
            assert between.startswith("\n<|im_start|>tool\n") and between.endswith("<|im_start|>assistant\n")
            for parts in zip(row["version_spans"], row["version_spans"][1:], strict=False):
                assert parts[0][2] < parts[1][1]  # what the tool said was made by no weights
    return with_tool / len(rows)


def check_record(record):
    """What is trained on is what the engine answered, turn by turn; each turn's prompt is all that was there before."""
    assert any(len(sample["requests"]) > 1 for sample in record)
    for sample in record:
        requests, tokens = sample["requests"], sample["tokens"]
        first = len(requests[0]["prompt"])
        mask = sample["mask"] or [1] * (len(tokens) - first)
        trained = [i for i, m in zip(tokens[first:], mask, strict=True) if m]
        assert trained == [i for request in requests for i in request["answer"]]
        for request in requests:
            before = len(request["prompt"])
            assert request["prompt"] == tokens[:before]
            assert request["answer"] == tokens[before : before + len(request["answer"])]
        assert len({request["session"] for request in requests}) == 1 and requests[0]["session"]  # one engine for all


def warm_up(out, steps):
    """What the second stage does to a model, in this process and with a few demonstrations of the careful writer."""
    task = load("make_sums_task")
    task.write_task(out / "task", seed=0, num_sft=steps * 48, num_train=64, num_eval=8, num_terms=2)
    rows = [json.loads(line) for line in (out / "task" / "sft.jsonl").read_text().splitlines()]
    rows = [row["messages"] for row in rows if row["metadata"]["writer"] == "careful"]
    tokenizer = AutoTokenizer.from_pretrained(out / "task" / "hf")
    model = AutoModelForCausalLM.from_pretrained(out / "task" / "hf", dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        pairs = [tokenize_conversation(row, tokenizer) for row in rows[16 * step : 16 * step + 16]]
        ids, mask = (pad_sequence([torch.tensor(pair[i]) for pair in pairs], batch_first=True) for i in (0, 1))
        log_probs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-(log_probs * mask[:, 1:]).sum() / mask.sum()).backward()
        optimizer.step()
    model.save_pretrained(out / "sft" / "hf")
    tokenizer.save_pretrained(out / "sft" / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_short_run(tmp_path, backend):
    warm_up(tmp_path, 60)
    small = f"--num-rollout 2 --rollout-batch-size 4 --num-threads 1 --rollout-backend {backend}".split()
    check_record(run_stages(tmp_path, slice(2, 3), *small))
    assert share_with_tool(tmp_path) > 1 / 8


@pytest.mark.slow
def test_the_reward_rises(tmp_path):
    check_record(run_stages(tmp_path, slice(3), "--rollout-backend", "embedded", "--num-threads", "1"))
    assert share_with_tool(tmp_path) > 1 / 8
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_reward_before"] < 0.6 and summary["eval_reward_after"] > summary["eval_reward_before"] + 0.25
