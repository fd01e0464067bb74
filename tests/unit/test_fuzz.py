"""Random command lines and rows: accepted with sane values, or refused with a named error, each within 2 s.

A failure prints its words or its row; `random.Random(seed)` makes them again.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.all_flags import own_flags
from instep.arguments.flag import Number
from instep.arguments.parse import parse
from instep.data.chat import render, tokenize_conversation
from instep.data.dataset import check_file, load_dataset
from instep.data.graders import NEED_LABELS
from instep.data.rows import RowFormat
from instep.errors import DataError, InstepError
from instep.preflight.inputs import check_inputs
from instep.rollout.rewards import text
from instep.rollout.rewards.dapo import dapo
from instep.types import Sample
from tests import fuzz
from tests.assets import make_checkpoint
from tests.chat import QWEN2, QWEN3, make_tokenizer

BOUND = 2.0  # seconds of computing, for each


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fuzz") / "hf")


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "hf")
    Path("data.jsonl").write_text('{"input": "1+1", "label": "2"}\n' * 4)
    for name, content in fuzz.YAML.items():
        Path(name).write_text(content)
    return tmp_path


BASE = "--hf-checkpoint hf --prompt-data data.jsonl --rollout-batch-size 4 --num-rollout 1 --actor-num-gpus-per-node 1"


def try_words(command: str, words: list[str]) -> bool:
    """Whether a command line is accepted; what is wrong with the answer is an assertion."""
    base = [] if command in ("serve", "plan") else BASE.split()
    base += ["--label-key", "label", "--rm-type", "math"] if command == "train" else []
    if command == "serve":
        base = ["--hf-checkpoint", "hf"]
    try:
        with fuzz.bounded(BOUND):
            args = parse([*base, *words], command)
            if command not in ("serve", "plan"):
                check_inputs(args)
    except SystemExit:  # --dump-config has written its file
        return True
    except InstepError as error:
        shown = str(error).encode("utf-8", "backslashreplace")
        assert error.what and error.where and len(shown) < 250_000
        return False
    json.dumps(args.to_dict(), ensure_ascii=False).encode()  # as config.json
    for name, flag in ((w, own_flags()[w]) for w in words if w in own_flags()):
        value = getattr(args, flag.attribute) if flag.status == "acts" and isinstance(flag.type, Number) else None
        for one in value if isinstance(value, list) else [value]:
            assert one is None or flag.type.low <= one <= flag.type.high, name
    return True


def try_many(seed: int, count: int) -> int:
    """How many random command lines are accepted; every refusal is a named error, in bounded time."""
    rng, known, accepted = random.Random(seed), fuzz.flags(), 0
    for _ in range(count):
        command, words = rng.choice(fuzz.COMMANDS), fuzz.words(rng, known)
        try:
            accepted += try_words(command, words)
        except BaseException as error:
            raise AssertionError(f"instep {command} {[w[:200] for w in words]}: {error!r:.300}") from error
    return accepted


def test_random_flags(here: Path):
    assert 0 < try_many(1, 250) < 250


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_many_random_flags(here: Path, seed: int):
    assert 0 < try_many(seed, 2000) < 2000


@pytest.mark.slow
def test_every_flag_with_every_strange_value(here: Path):
    tried = accepted = 0
    for flag in {f.name: f for f in fuzz.flags()}.values():
        for value in fuzz.values_of(flag):
            try:
                accepted += try_words("train", [flag.name, value])
            except BaseException as error:
                raise AssertionError(f"{flag.name} {value[:200]!r}: {error!r:.300}") from error
            tried += 1
    assert 0 < accepted < tried


# ---- rows ------------------------------------------------------------------------------------------------------------


FORMATS: list[RowFormat] = [
    RowFormat("prompt"),
    RowFormat("prompt", "label"),
    RowFormat("prompt", "label", grader=""),
    *(RowFormat("prompt", "label", grader=rule) for rule in NEED_LABELS),
    RowFormat("prompt", conversation=True),
    RowFormat("prompt", pair_keys=("chosen", "rejected")),
]


def use(record: Any, rows: RowFormat, tokenizer: Any) -> None:
    """What a run does with a row that was accepted."""
    sample = Sample(prompt=copy.deepcopy(record.prompt), label=copy.deepcopy(record.label), metadata=record.metadata)
    json.dumps(sample.to_dict(), ensure_ascii=False).encode()  # as in samples and run states
    prompt = record.prompt
    words = prompt if isinstance(prompt, str) else render(prompt, tokenizer, record.tools, generation_prompt=True)
    assert all(isinstance(i, int) for i in tokenizer(words, add_special_tokens=False)["input_ids"])
    sample.response = "so \\boxed{2}. Answer: 2"
    rule = (record.metadata or {}).get("rm_type") or rows.grader
    if rule and rows.grader is not None and str(rule) in NEED_LABELS:
        grade = {"f1": text.f1, "dapo": dapo}.get(str(rule))
        if grade:
            grade(sample.response, sample.label)
        elif rule == "gpqa":
            text.gpqa(sample.response, sample.label, sample.metadata)
        else:
            for label in sample.label if isinstance(sample.label, list) else [sample.label]:
                text.quick_equal("2", text.last_boxed(str(label)) or str(label))
    if rows.conversation:
        try:
            tokenize_conversation(record.messages or record.prompt, tokenizer, record.tools)
        except DataError as error:
            assert error.what


def try_rows(folder: Path, seed: int, count: int) -> int:
    rng, tokenizer = random.Random(seed), make_tokenizer()
    accepted = 0
    for number in range(count):
        line, rows = fuzz.row(rng), rng.choice(FORMATS)
        tokenizer.chat_template = rng.choice((QWEN2, QWEN3))
        good = b'{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "label": "A", '
        good += (
            b'"chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]}'
        )
        path = folder / f"{number}.jsonl"
        path.write_bytes(good + b"\n" + line + b"\n")
        options: dict[str, Any] = {"apply_chat_template": not rows.conversation, "tokenizer": tokenizer}
        try:
            with fuzz.bounded(BOUND):
                accepted += try_row(path, rows, options)
        except BaseException as error:
            raise AssertionError(f"{rows} {line[:500]!r}: {error!r:.300}") from error
        path.unlink()
    return accepted


def try_row(path: Path, rows: RowFormat, options: dict[str, Any]) -> bool:
    """Whether the second row of a file is accepted. Where it is not, it is named, and `--skip-bad-rows` counts it."""
    try:
        check_file(str(path), rows)
        data = load_dataset(str(path), rows, **options, max_prompt_len=10_000)
    except DataError as error:
        assert error.where == f"{path}, line 2" and error.what and error.remedy
        str(error).encode()
        data = load_dataset(str(path), rows, **options, skip_bad_rows=True)
        assert len(data) == 1 and [e.where for e in data.bad_rows.errors] == [f"{path}, line 2"]
        return False
    for record in data:
        use(record, rows, options["tokenizer"])
    return len(data) == 2


def test_random_rows(tmp_path: Path):
    assert 75 < try_rows(tmp_path, 1, 750) < 750


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_rows(tmp_path: Path, seed: int):
    assert 200 < try_rows(tmp_path, seed, 2000) < 2000
