"""On-policy distillation: where the teacher's log-probs enter, and which flags go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.advantage_columns import add_advantages
from instep.controller.round import TrainingRound
from instep.data.batch import build_batch
from instep.errors import ConfigError
from instep.types import Sample
from tests.assets import make_checkpoint, make_prompts

URL = "--use-opd --opd-teacher-url 127.0.0.1:9000"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opd")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 4)
    return folder


def arguments(root: Path, more: str, reward: str = "--rm-type math --label-key label", command: str = "train"):
    line = f"--hf-checkpoint {root / 'hf'} --prompt-data {root / 'train.jsonl'} --input-key prompt {reward} "
    line += "--rollout-batch-size 2 --num-rollout 2 --actor-num-gpus-per-node 1 --device cpu "
    return parse(f"{line}{'' if command == 'sft' else '--rollout-max-response-len 8'} {more}".split(), command)


def columns_of(args, rewards=(1.0, 0.0, 0.0)):
    """Three samples of a group, of which the last has a tool's token at its end; NaN stands there."""
    samples = []
    for index, (reward, mask) in enumerate(zip(rewards, ([1, 1], [1], [1, 1, 0]), strict=True)):
        sample = Sample(group_index=0, index=index, reward=reward, tokens=[1, 2])
        sample.append_response_tokens(list(range(len(mask))), [-1.0] * len(mask))
        sample.loss_mask, sample.status = mask, Sample.Status.COMPLETED
        samples.append(sample)
    batch = build_batch([samples])
    batch.token_columns["log_probs"] = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0, float("nan")])
    batch.token_columns["teacher_log_probs"] = torch.tensor([-2.0, -1.0, -3.0, -2.5, -2.0, -1.0])
    metrics = add_advantages(batch, samples, args, args.view({}))
    return batch.token_columns["advantages"], metrics


def test_the_distance_to_the_teacher_is_taken_off_token_by_token(root: Path):
    got, metrics = columns_of(arguments(root, f"{URL} --opd-kl-coef 0.5 --advantage-estimator dr_grpo"))
    two, one = 2 / 3, -1 / 3
    assert got[:5].tolist() == pytest.approx([two - 0.5, two + 0.5, one, one - 0.75, one])
    assert metrics["train/opd_reverse_kl"] == pytest.approx((1 - 1 + 0 + 1.5 + 0) / 5)


def test_whitening_comes_after_it(root: Path):
    plain, _ = columns_of(arguments(root, f"{URL} --advantage-estimator dr_grpo"))
    white, _ = columns_of(arguments(root, f"{URL} --advantage-estimator dr_grpo --normalize-advantages"))
    trained = plain[:5].double()
    expected = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    assert white[:5].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gspo"])
def test_without_a_reward_only_the_teacher_counts(root: Path, estimator: str):
    """With one sample per prompt, too: nothing is compared. The reward of a sample is 0."""
    args = arguments(root, f"{URL} --advantage-estimator {estimator} --n-samples-per-prompt 1", reward="")
    got, _ = columns_of(args, (0.0, 0.0, 0.0))
    distance = torch.tensor([-1.0, 1.0, 0.0, -1.5, 0.0])
    if estimator == "reinforce_plus_plus":
        distance = (distance - distance.mean()) / (distance.var() + 1e-8).sqrt()
    assert got[:5].tolist() == pytest.approx(distance.tolist(), abs=1e-6)


def test_rewards_that_are_only_reported(root: Path):
    hook = "--custom-reward-post-process-path instep.rollout.teacher.no_rewards"
    got, _ = columns_of(arguments(root, f"{URL} {hook}"))
    assert got[:5].tolist() == pytest.approx([-1.0, 1.0, 0.0, -1.5, 0.0])


def test_what_is_scored(root: Path):
    """The student's log-probs are needed even where one step would do without them."""
    served = TrainingRound(arguments(root, URL), None, None)  # type: ignore[arg-type]
    assert served._scored_names(1) == ["log_probs"] and served._teacher is not None
    model = arguments(root, f"--use-opd --opd-teacher-load {root / 'hf'} --use-rollout-logprobs --kl-coef 0.1")
    loaded = TrainingRound(model, None, None)  # type: ignore[arg-type]
    assert loaded._teacher is None
    assert loaded._scored_names(1) == ["ref_log_probs", "log_probs", "teacher_log_probs"]
    assert TrainingRound(arguments(root, ""), None, None)._scored_names(1) == []  # type: ignore[arg-type]


def test_names_of_slime(root: Path):
    args = arguments(root, "--use-opd --opd-type sglang --rm-url http://teacher:9000/generate", reward="")
    assert (args.opd_type, args.opd_teacher_url) == ("engine", "http://teacher:9000")
    args = arguments(root, f"--use-opd --opd-type megatron --opd-teacher-load {root / 'hf'}", reward="")
    assert (args.opd_type, args.opd_teacher_url, args.opd_kl_coef) == ("model", None, 1.0)
    assert arguments(root, f"--use-opd --opd-teacher-load {root / 'hf'}").opd_type == "model"
    assert arguments(root, "--use-opd --opd-teacher-url https://h").opd_teacher_url == "https://h"


REFUSED = [
    ("--opd-kl-coef 2", "has no effect without --use-opd"),
    ("--opd-teacher-url h:1", "has no effect without --use-opd"),
    ("--use-opd", "there is no teacher"),
    ("--use-opd --opd-type model --opd-teacher-url h:1", "there is no teacher"),
    ("--use-opd --opd-type engine --opd-teacher-load {root}/hf", "there is no teacher"),
    (URL + " --opd-teacher-load {root}/hf", "served or loaded"),
    (URL + " --opd-teacher-ckpt-step 3", "needs --opd-teacher-load"),
    (URL + " --rollout-temperature 0.7", "at temperature 1"),
    ("--use-opd --opd-teacher-url h:port", "is not an address"),
    ("--use-opd --opd-teacher-url ftp://h", "is not an address"),
    ("--use-opd --opd-teacher-load {root}/nothing", "no folder"),
    ("--use-opd --rm-url http://h:1 --rm-type remote_rm", "there is no teacher"),
    (URL + " --opd-kl-coef 0", "must be above 0"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_refused(root: Path, more: str, words: str):
    with pytest.raises(ConfigError) as error:
        arguments(root, more.format(root=root), "" if "--rm-type" in more else "--rm-type math --label-key label")
    assert words in str(error.value)


def test_no_teacher_for_sft(root: Path):
    with pytest.raises(ConfigError, match="no meaning for `instep sft`"):
        arguments(root, URL, reward="", command="sft")


def test_a_temperature_is_fine_for_a_loaded_teacher(root: Path):
    assert arguments(root, f"--use-opd --opd-teacher-load {root / 'hf'} --rollout-temperature 0.7").use_opd
