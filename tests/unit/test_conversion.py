"""`--custom-convert-samples-to-train-data-path`: slime's dict of lists is what training gets, or an error names it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from instep.controller.role import RoleTrainer
from instep.controller.round import TrainedBatch, TrainingRound
from instep.data.conversion import _sample
from instep.errors import ConfigError, RolloutError
from instep.system.hooks import Hook
from instep.training import lr_schedule
from instep.training.loss_hooks import hook_batch
from instep.types import Group, Sample, Status, TokenBatch
from tests import loss_hooks
from tests.assets import make_checkpoint, make_prompts
from tests.unit.test_training_round import Workers, arguments, rollout

ME = "tests.unit.test_conversion.convert"
FLAG = f"--custom-convert-samples-to-train-data-path {ME}".split()
GONE = object()  # no such field
LAYOUT = [SimpleNamespace(dp_rank=0, dp_size=1, cp_size=1, micro_batch_multiple=1)]
current: dict[str, Callable[..., Any]] = {}  # what `convert` does


def convert(args: Any, samples: list[Sample]) -> Any:
    return current["does"](args, samples)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversion")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 4)
    return folder


def samples_of_round() -> list[Group]:
    """Two groups of four executions; one sample is removed, one has masked tokens, one is truncated."""
    groups = rollout()
    for group in groups:
        for sample in group:
            sample.execution_id = f"{sample.group_index}.{sample.index}"
        group[1].remove_sample, group[2].loss_mask, group[3].status = True, [1, 0, 1, 1, 0], Status.TRUNCATED
    return groups


def trained(
    root: Path, does: Callable[..., Any] | None, *flags: str, **more: Any
) -> tuple[TrainedBatch, TokenBatch, Workers]:
    """One round of eight samples; `does` converts them."""
    current["does"] = does or convert
    args, workers = arguments(root, *(FLAG if does else ()), *flags), Workers()
    actor = RoleTrainer(args, workers, LAYOUT, lr_schedule.from_args(args, 10))  # type: ignore[arg-type]
    out = TrainingRound(args, args.view({}), actor).run(samples_of_round(), 0, version=7, **more)
    assert workers.batch is not None
    return out, workers.batch, workers


def changed(**fields: Any) -> Callable[..., Any]:
    """slime's conversion with other fields: a value, or a function of what there is."""

    def does(args: Any, samples: list[Sample]) -> dict[str, Any]:
        data = loss_hooks.convert(args, samples)
        made = {name: value(data.get(name)) if callable(value) else value for name, value in fields.items()}
        return {name: value for name, value in {**data, **made}.items() if value is not GONE}

    return does


def rows(*numbers: int) -> Callable[..., Any]:
    """slime's conversion of some of the samples."""
    return lambda args, samples: {
        name: [column[i] for i in numbers] for name, column in loss_hooks.convert(args, samples).items()
    }


@pytest.mark.parametrize("flags", ["", "--num-steps-per-rollout 2", "--calculate-per-token-loss"])
def test_slimes_own_conversion_changes_nothing(root: Path, flags: str) -> None:
    plain, theirs, workers = trained(root, None, *flags.split(), keep={1, 6})
    converted, ours, our_workers = trained(root, loss_hooks.convert, *flags.split(), keep={1, 6})
    assert ours.tokens.tolist() == theirs.tokens.tolist() and our_workers.scored == workers.scored
    assert converted.step_of_sample == plain.step_of_sample and converted.sources == plain.sources == list(range(8))
    assert converted.log_probs.keys() == plain.log_probs.keys()
    assert ours.token_columns.keys() == theirs.token_columns.keys() > {"older", "fresh", "rollout_log_probs"}
    for name, column in theirs.token_columns.items():
        torch.testing.assert_close(ours.token_columns[name], column, rtol=1e-5, atol=1e-6, msg=name)
    assert ours.token_columns["advantages"].abs().max() > 0.5
    for name in theirs.sample_columns.keys() - {"rewards"}:
        assert list(ours.sample_columns[name]) == list(theirs.sample_columns[name]), name
    assert ours.sample_columns["raw_reward"].tolist() == theirs.sample_columns["rewards"].tolist()


def test_what_the_function_returns_is_what_the_loss_gets(root: Path) -> None:
    """Final rewards, masks, log-probs of engine and teacher, metadata, and fields of the user's own."""
    data: dict[str, Any] = {
        "rewards": np.arange(8) / 8,
        "raw_reward": torch.ones(8),
        "loss_masks": [[0, 0, 0, 1, 1]] * 8,  # also of a sample that was removed
        "rollout_log_probs": torch.full((8, 5), -3.0),
        "teacher_log_probs": [np.full(5, -4.0)] * 8,
        "metadata": [{"loss_type": i} for i in range(8)],
        "mine": torch.arange(16).view(8, 2),
        "rows": list(torch.arange(8).float()),
        "words": [f"w{i}" for i in range(8)],
    }
    _, batch, _ = trained(root, changed(**data, truncated=GONE, multimodal_train_inputs=[None] * 8))
    part = hook_batch(batch.select([6, 1]))
    assert torch.stack(part["advantages"])[:, 3:].tolist() == [[0.75] * 2, [0.125] * 2]
    assert part["rewards"].tolist() == [0.75, 0.125] and part["raw_reward"].tolist() == [1, 1]
    assert [m.tolist() for m in part["loss_masks"]] == [[0, 0, 0, 1, 1]] * 2
    assert torch.cat(part["rollout_log_probs"]).tolist() == [-3.0] * 10
    assert torch.cat(part["teacher_log_probs"]).tolist() == [-4.0] * 10
    assert part["metadata"] == part["train_metadata"] == [{"loss_type": 6}, {"loss_type": 1}]
    assert part["mine"].tolist() == [[12, 13], [2, 3]] and [float(x) for x in part["rows"]] == [6, 1]
    assert part["words"] == ["w6", "w1"] and part["status"] == ["completed", "completed"]


def test_fields_of_the_users_own_reach_custom_advantages(root: Path) -> None:
    hook = "--custom-advantage-function-path tests.unit.test_conversion.own_advantages"
    _, batch, _ = trained(root, changed(mine=list(range(8))), *hook.split())
    expected = batch.sample_columns["rewards"] + torch.arange(8)
    torch.testing.assert_close(batch.token_columns["advantages"].view(8, 5), expected[:, None].expand(8, 5))


def own_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    values = zip(rollout_data["mine"], rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    rollout_data["advantages"] = [torch.full((length,), mine + reward) for mine, reward, length in values]


def test_rows_may_be_others_than_the_samples(root: Path) -> None:
    """Sample 3 is left out, 5 split into two, of which one has other tokens; the loss's denominators are the user's."""

    def does(args: Any, samples: list[Sample]) -> dict[str, Any]:
        data = rows(0, 1, 2, 4, 5, 5, 6, 7)(args, samples)
        data["tokens"][5], data["response_lengths"][5] = [4, 5, 9], 1
        data["loss_masks"][5], data["rollout_log_probs"][5] = [1], [-9.0]
        data["rollout_ids"][5] = "another"
        data["rollout_mask_sums"][0] = 10
        return data

    out, batch, _ = trained(root, does, keep=set(range(8)))
    assert out.sources == [0, 1, 2, 4, 5, -1, 6, 7] and batch.total_lengths.tolist() == [7] * 5 + [3] + [7] * 2
    rows_of = batch.token_columns["loss_weights"].split(batch.response_lengths.tolist())
    assert rows_of[0].tolist() == pytest.approx([1 / 80] * 5) and rows_of[4].tolist() == pytest.approx([0.0] * 5)
    assert rows_of[7].tolist() == pytest.approx([1 / 40] * 5)
    fresh = batch.token_columns["fresh"].split(batch.response_lengths.tolist())
    assert fresh[0].tolist() == [0, 0, 0, 1, 1] and fresh[5].tolist() == [0], "of no version that is known"
    executions = batch.sample_columns["execution_id"]
    assert executions[4:6] == ["1.5", "another"] and batch.sample_columns["index"].tolist()[4:6] == [5, 5]


def test_last_executions_that_fill_no_step_are_left_out_with_a_line(root: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        out, batch, _ = trained(root, rows(0, 1, 2, 4, 5, 6), "--global-batch-size", "4")
    assert out.sources == [0, 1, 2, 4] and batch.num_samples == 4 and out.step_of_sample == [0] * 4
    assert "6 executions are not a multiple of --global-batch-size 4: the last 2 are not trained on" in caplog.text


def test_without_sample_indices_rows_are_told_by_their_place(root: Path) -> None:
    out, batch, _ = trained(root, changed(sample_indices=GONE, rollout_ids=GONE, raw_reward=None))
    assert out.sources == list(range(8)) and batch.sample_columns["execution_id"][5] == "1.5"
    assert "raw_reward" not in batch.sample_columns


def row(i: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda column: [*column[:i], value, *column[i + 1 :]]


WRONG = [
    ("tokens", GONE, "tokens: it is missing"),
    ("loss_masks", None, "loss_masks: it is missing"),
    ("rewards", GONE, "rewards: it is missing"),
    ("rewards", [1.0] * 7, "rewards: it has 7 entries for 8 rows of tokens"),
    ("rewards", row(3, float("nan")), "rewards[3] is nan, no finite number"),
    ("rewards", row(3, {"score": 1}), "rewards[3] is {'score': 1}, no finite number"),
    ("raw_reward", "high", "returned 'high'"),
    ("response_lengths", row(2, 7), "response_lengths[2] is 7 of 7 tokens"),
    ("response_lengths", row(2, 5.0), "response_lengths[2] is 5.0"),
    ("loss_masks", row(4, [1]), "loss_masks[4] is 1 entries for 5 response tokens"),
    ("loss_masks", row(4, [1, 2, 1, 1, 1]), "loss_masks[4] holds 2"),
    ("loss_masks", row(4, [1, None, 1, 1, 1]), "loss_masks[4] holds None"),
    ("tokens", row(4, 17), "tokens[4] is 17"),
    ("tokens", row(4, ["a"] * 7), "tokens are not a list of ids"),
    ("rollout_log_probs", row(0, [0.0] * 4), "rollout_log_probs[0] is 4 entries for 5"),
    ("rollout_log_probs", row(0, [float("inf")] * 5), "rollout_log_probs[0] is inf"),
    ("teacher_log_probs", [None] * 8, "teacher_log_probs[0] is None for 5"),
    ("teacher_log_probs", [[float("nan")] * 5] * 8, "teacher_log_probs[0] is not finite"),
    ("mine", np.array(3), "returned array(3)"),
    ("sample_indices", row(1, 99), "sample_indices[1] is 99, the index of no sample"),
    ("rollout_ids", ["one"] * 8, "1 executions are fewer than the 8 of an optimizer step"),
    ("multimodal_train_inputs", [{}] * 8, "images and audio are not supported"),
    ("mine", 3, "returned 3"),
    ("mine", [1, 2], "mine: it has 2 entries for 8 rows"),
    ("advantages", [1.0] * 8, "advantages: training makes a column of this name"),
]


@pytest.mark.parametrize(("name", "value", "what"), WRONG, ids=[f"{name}-{what[:20]}" for name, _, what in WRONG])
def test_a_wrong_field_is_one_error_that_names_hook_and_field(root: Path, name: str, value: Any, what: str) -> None:
    with pytest.raises(RolloutError) as error:
        trained(root, changed(**{name: value}))
    assert what in error.value.what and error.value.remedy, error.value
    assert f"{' '.join(FLAG)}, " in error.value.where and "test_conversion.py:" in error.value.where
    assert name.removesuffix("s") in str(error.value)


def test_the_order_of_the_fields_does_not_matter(root: Path) -> None:
    with pytest.raises(RolloutError, match="returned 17") as error:
        trained(root, lambda args, samples: {**dict(reversed(loss_hooks.convert(args, samples).items())), "tokens": 17})
    assert "field tokens" in error.value.where


def test_masks_of_a_tensor_are_numbers_as_others(root: Path) -> None:
    """Without log-probs of the conversion's own: those of the samples are kept."""
    mask = [1, 1, 1, 0, 1]
    for masks in (torch.tensor([mask] * 8).float(), [np.array(mask, bool)] * 8):
        _, batch, _ = trained(root, changed(loss_masks=masks, rollout_log_probs=GONE))
        assert batch.token_columns["loss_mask"].tolist() == mask * 8


def test_rows_without_their_samples_and_no_rows_are_refused(root: Path) -> None:
    def without_indices(args: Any, samples: list[Sample]) -> dict[str, Any]:
        return {name: column for name, column in rows(0, 1)(args, samples).items() if name != "sample_indices"}

    with pytest.raises(RolloutError, match="sample_indices: it is missing, and there are 2 rows for 8 samples"):
        trained(root, without_indices)
    with pytest.raises(RolloutError, match="tokens: it has 0 entries"):
        trained(root, rows())


def test_the_rewards_of_a_conversion_leave_no_room_for_other_terms(root: Path) -> None:
    for more in ("--kl-coef 0.1", "--overlong-buffer-len 4 --rollout-max-response-len 8"):
        with pytest.raises(ConfigError, match="the hook's rewards would replace those"):
            arguments(root, *FLAG, *more.split())
    hook = "--custom-reward-post-process-path tests.loss_hooks.raises"
    assert any(
        "--custom-reward-post-process-path is not called" in note
        for note in arguments(root, *FLAG, *hook.split()).notes
    )


def test_a_token_that_no_engine_sampled_has_no_log_prob_of_one() -> None:
    """Between turns the source holds zeros in place of log-probs."""
    kept = {
        "tokens": [5, 6, 7, 8],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-1.0, 0.0, -2.0],
    }
    fields = {"tokens": [5, 6, 7, 8], "response_lengths": 3}
    for mask, expected in (([1, 1, 1], None), ([1, 0, 0], [-1.0, 0.0, -2.0])):
        made, same = _sample(Hook(FLAG[0], "a.b"), {**fields, "loss_masks": mask}, 0, Sample(**kept))
        assert same and made.rollout_log_probs == expected
