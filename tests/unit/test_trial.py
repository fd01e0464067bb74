"""The trial of hooks: a reward that fails for the end-of-turn token is noted; responses are as engines make them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.trial import HookTrial
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import ConfigError
from tests.assets import make_checkpoint, make_prompts

END = "<|im_end|>"
seen: list[tuple[str, list[int]]] = []


async def equal(args, sample):
    seen.append((sample.response, sample.tokens[-sample.response_length :]))
    return float(sample.response == sample.label)


async def equal_or_minus_one(args, sample):
    return {"score": 1 if sample.response == sample.label else -1}


async def equal_in_groups(args, samples):
    return [float(sample.response == sample.label) for sample in samples]


async def by_chance(args, sample):
    return float(torch.rand(()) + random.random() + np.random.rand())


def contained(args, sample):
    return float(sample.label in sample.response)


def short(args, sample):
    return 1 - len(sample.response) / 100


def minus_length(args, sample):
    return -len(sample.response)


def without_end(args, sample):
    sample.response = sample.response.removesuffix(END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    make_checkpoint(folder / "hf")
    make_prompts(folder / "train.jsonl", 8)
    return folder


def test_a_checkpoint_without_an_end_token_is_noted(folder: Path, tmp_path: Path) -> None:
    for name in ("hf", "train.jsonl"):
        (shutil.copytree if name == "hf" else shutil.copy)(folder / name, tmp_path / name)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (path := tmp_path / "hf" / name).exists():
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if "eos" not in k}))
    (note,) = notes(tmp_path, "contained")
    assert "no end token" in note and notes(tmp_path, "contained", "--rollout-stop", "x") == []


def trial_of(folder: Path, reward: str, *more: str) -> HookTrial:
    line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --input-key prompt --label-key label "
    line += "--rollout-batch-size 4 --num-rollout 1 --actor-num-gpus-per-node 1 --device cpu --apply-chat-template "
    line += f"--rollout-max-response-len 8 --custom-rm-path {__name__}.{reward}"
    args = parse([*line.split(), *more], "train")
    return HookTrial(args, args.view({}), RolloutDataSourceWithBuffer(args))


def notes(folder: Path, reward: str, *more: str) -> list[str]:
    trial = trial_of(folder, reward, *more)
    trial.before_start()
    return trial.notes


@pytest.mark.parametrize(
    "reward, more",
    [("equal", []), ("equal_or_minus_one", ["--reward-key", "score"]), ("equal_in_groups", ["--group-rm"])],
)
def test_a_reward_of_equality_is_noted(folder, reward, more):
    (note,) = notes(folder, reward, *more)
    assert f"--custom-rm-path {__name__}.{reward}" in note
    assert f"sample.response.removesuffix('{END}')" in note and "--rollout-skip-special-tokens" in note
    assert notes(folder, reward, *more, "--rollout-skip-special-tokens") == []
    assert notes(folder, reward, *more, "--rollout-sample-hook-path", f"{__name__}.without_end") == []


@pytest.mark.parametrize("reward", ["contained", "short", "minus_length"])
def test_other_rewards_are_not(folder, reward):
    assert notes(folder, reward) == []


def test_a_made_up_response_is_like_an_engines(folder):
    for more, ends in (([], True), (["--rollout-skip-special-tokens"], False)):
        seen.clear()
        notes(folder, "equal", *more)
        assert seen[0][0].endswith(END) is ends
        assert all(ids[-1] == 2 for _, ids in seen)  # the tokens are the same either way


def test_it_leaves_no_trace_in_rows_and_random_numbers(folder):
    source = RolloutDataSourceWithBuffer(trial_of(folder, "by_chance")._args)
    trial = trial_of(folder, "by_chance")
    numbers = []
    for tried in (False, True):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        if tried:
            trial.before_start()
        numbers.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert numbers[0] == numbers[1]
    assert trial._source.state_dict() == source.state_dict()


class Forgetful(RolloutDataSourceWithBuffer):
    """It tells where it stands, and takes nothing back."""

    add_samples = property()  # type: ignore[assignment]  # raises AttributeError


def test_what_a_save_would_have_to_put_back_needs_add_samples(folder, tmp_path):
    for save in ([], ["--save", str(tmp_path / "ckpt")]):
        trial = trial_of(folder, "short", *save)
        trial._source = Forgetful(trial._args)
        if not save:
            trial.before_start()
            continue
        with pytest.raises(ConfigError, match="has no add_samples"):
            trial.before_start()
