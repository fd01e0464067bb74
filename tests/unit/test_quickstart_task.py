"""The quickstart's tasks: answers against independent oracles, disjoint files, tokens that survive a round trip."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLES))

import make_cups_task  # noqa: E402
import make_task  # noqa: E402

TASKS = {"total": make_task.RunningTotal(), "cups": make_cups_task.Cups()}


def oracle(text: str) -> int:
    """The answer, read from the question alone."""
    if text.startswith("Compute "):
        return sum(int(x) for x in re.findall(r"[+-]\d", text))
    cups = ["ball", "", "", "", ""]
    for i, j in re.findall(r" [a-h](\d)(\d)", text):
        a, b = int(i) - 1, int(j) - 1
        cups[a], cups[b] = cups[b], cups[a]
    return cups.index("ball") + 1


def boxed(text: str) -> str:
    return re.findall(r"\\boxed\{([^{}]*)\}", text)[-1]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=sorted(TASKS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    make_task.write_task(TASKS[request.param], out, seed=3, num_sft=600, num_train=100, num_eval=256)
    return out


def test_labels_and_worked_steps_are_right(folder: Path) -> None:
    for row in read(folder / "eval.jsonl") + read(folder / "train.jsonl"):
        assert row["label"] == str(oracle(row["prompt"][0]["content"]))
    careful = [r for r in read(folder / "sft.jsonl") if r["metadata"]["writer"] == "careful"]
    assert len(careful) > 100
    for row in careful:
        text, response = (m["content"] for m in row["messages"])
        assert boxed(response) == str(oracle(text))
        instruction, *entries = re.split(r" (?=[a-h][+\-\d])", text)
        steps = response.split(" ")[:-1]
        assert [s.split("=")[0] for s in steps] == entries
        for i, step in enumerate(steps):  # every step, not only the last, is the answer to the problem so far
            assert step.split("=")[1] == str(oracle(" ".join([instruction, *entries[: i + 1]])))


def test_hasty_and_sloppy_writers_are_often_wrong(folder: Path) -> None:
    right, total = Counter[str](), Counter[str]()
    for row in read(folder / "sft.jsonl"):
        writer, (user, assistant) = row["metadata"]["writer"], row["messages"]
        total[writer] += 1
        right[writer] += boxed(assistant["content"]) == str(oracle(user["content"]))
        assert (user["step_loss_mask"], assistant["step_loss_mask"]) == (0, 1)
        assert ("=" in assistant["content"]) == (writer != "hasty")
    for writer, share in make_task.MIXTURE.items():
        assert abs(total[writer] / 600 - share) < 0.08
    assert right["hasty"] / total["hasty"] < 0.4
    assert right["sloppy"] < total["sloppy"]


def test_held_out_problems_stand_nowhere_else(folder: Path) -> None:
    trained = {r["messages"][0]["content"] for r in read(folder / "sft.jsonl")}
    trained |= {r["prompt"][0]["content"] for r in read(folder / "train.jsonl")}
    held_out = [r["prompt"][0]["content"] for r in read(folder / "eval.jsonl")]
    assert len(set(held_out)) == len(held_out) == 256
    assert not trained & set(held_out)


def test_training_and_evaluation_see_the_same_lengths() -> None:
    """Short problems are few: without repeats a long training set would hardly have any."""
    task, rng = TASKS["total"], random.Random(0)
    held_out = make_task.held_out_problems(task, rng, 512)
    problems = make_task.problems_for_training(task, rng, held_out)
    trained = Counter(len(next(problems)) for _ in range(10000))
    assert all(abs(trained[n] / 10000 - 0.25) < 0.06 for n in range(3, 7))
    assert all(abs(Counter(map(len, held_out))[n] / 512 - 0.25) < 0.08 for n in range(3, 7))


def test_running_total_stays_a_digit() -> None:
    rng = random.Random(0)
    task = make_task.RunningTotal()
    for _ in range(500):
        problem = task.problem(rng)
        states = task.states(problem, lambda: None)
        assert 3 <= len(problem) <= 6
        assert all(0 <= s <= 9 for s in states) and all(-9 <= e <= 9 and e for e in problem)


def test_a_slip_is_carried_on() -> None:
    slips = iter([None, 5, None])
    assert make_task.worked(make_task.RunningTotal(), [3, 4, 1], lambda: next(slips)) == "a+3=3 b+4=5 c+1=6 \\boxed{6}"


def test_checkpoint_and_tokenizer_load_in_plain_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    for row in read(folder / "sft.jsonl")[:100]:
        for message in row["messages"]:
            ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == message["content"]
    text = "any text, even \u00e9\u00df\u6f22 and\nnew lines"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_template_of_a_prompt_is_a_prefix_of_the_conversation(folder: Path) -> None:
    """What the loss mask of SFT rests on: prompt tokens first, then the response's, then the end of the turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    for row in read(folder / "sft.jsonl")[:50]:
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        full = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        response = tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"]
        assert full[: len(prompt)] == prompt
        assert full[len(prompt) : len(prompt) + len(response) + 1] == response + [tokenizer.eos_token_id]
        assert len(response) + 1 <= 32


def test_same_seed_same_bytes_other_seed_other_data(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_task.write_task(TASKS["total"], tmp_path / name, seed=seed, num_sft=200, num_train=20, num_eval=20)
    files = ["sft.jsonl", "train.jsonl", "eval.jsonl", "hf/model.safetensors", "hf/tokenizer.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    for file in files[:4]:
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()
