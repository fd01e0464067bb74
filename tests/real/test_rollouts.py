"""`instep train` on the embedded engine with real tokenizers: turns of a model, a tool and a user, in all scripts."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import commands
from tests.real.templates import TEXTS, TOOLS, Message
from tests.real.tool_turns import TURN, following

GENERATE = "tests.real.tool_turns.generate"


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 rollouts of 2 prompts x 2 samples."""
    out = tmp_path_factory.mktemp("run")
    data = out / "train.jsonl"
    rows = [{"prompt": asked(row), "label": "", "metadata": {"row": row}, "tools": TOOLS} for row in range(4)]
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    words = ["train", "--hf-checkpoint", folder, "--prompt-data", data, "--input-key", "prompt", "--label-key", "label"]
    words += ["--train-backend", "hf", "--device", "cpu", "--actor-num-gpus-per-node", 1, "--num-threads", 1]
    words += ["--num-rollout", 2, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--lr", 1e-3]
    words += ["--rollout-max-response-len", 400, "--max-tokens-per-gpu", 512, "--use-dynamic-batch-size"]
    words += ["--custom-generate-function-path", GENERATE, "--custom-rm-path", "tests.real.tool_turns.reward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(commands.ENVIRONMENT, "TOOL_RECORD", str(out / "record.jsonl"))
        done = commands.run([*map(str, words), "--run-dir", str(out)])
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return out


def asked(row: int) -> list[Message]:
    return [{"role": "user", "content": "".join(TEXTS[row::4])}]


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def test_prompts_are_what_the_template_makes(name: str, tokenizer: Any, trained: Path) -> None:
    """The first by its ids, the next by their text, after the very ids that the engine got and gave."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    record = rows_of(trained / "record.jsonl")
    assert {one["row"] for one in record} == set(range(4)) and len(record) >= 8
    for one in record:
        messages, before, extends, num_samples = asked(one["row"]), list[int](), True, 1
        for request, messages_after in zip(one["requests"], [*following(one["row"]), []], strict=True):
            prompt, answer = request["prompt"], request["answer"]
            ids, text = (
                tokenizer.apply_chat_template(
                    messages, tools=TOOLS, add_generation_prompt=True, tokenize=tokenize, return_dict=False
                )
                for tokenize in (True, False)
            )
            assert nfc(tokenizer.decode(prompt)) == nfc(text) and (before or prompt == ids)
            assert (prompt[: len(before)] == before) == extends
            num_samples += not extends
            said = list(answer)
            while said and said[-1] in special:
                said.pop()
            assert len(answer) == TURN or answer[-1] == tokenizer.eos_token_id
            messages += [{"role": "assistant", "content": tokenizer.decode(said)}, *messages_after]
            # A sibling begins where Mistral's tools move, and after another end than the template's.
            moved = name == "mistral" and messages[-1]["role"] == "user"
            extends = not moved and answer[len(said) :] in ([], [tokenizer.eos_token_id])
            before = prompt + answer
        assert len(one["samples"]) == num_samples


def test_what_is_trained_is_what_the_engine_gave(name: str, tokenizer: Any, trained: Path) -> None:
    for one in rows_of(trained / "record.jsonl"):
        answers = [i for request in one["requests"] for i in request["answer"]]
        assert answers == [
            i for sample in one["samples"] for i, m in zip(response_of(sample), sample["mask"], strict=True) if m
        ]
        for sample in one["samples"]:
            assert sample["response"] == tokenizer.decode(response_of(sample))


def response_of(sample: dict[str, Any]) -> list[int]:
    return sample["tokens"][len(sample["tokens"]) - len(sample["mask"]) :]


def test_trainer_and_engine_agree(tokenizer: Any, trained: Path) -> None:
    steps = [row for row in rows_of(trained / "metrics.jsonl") if "train/log_prob_gap_max" in row]
    assert len(steps) == 2 and all(0 < row["train/log_prob_gap_max"] < 1e-4 for row in steps)
    assert all(row["train/grad_norm"] > 0 for row in steps)
    rows = rows_of(trained / "samples.jsonl")
    assert len(rows) >= 8
    for row in rows:
        ids, texts = row["tokens"]["ids"], row["tokens"]["texts"]
        assert row["response"] == tokenizer.decode(ids)
        assert len(texts) == len(ids)
