"""The flags of `instep train-async`, and when it syncs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.arguments import parse
from instep.train_async import syncs_after
from tests.command_line import argv, make_folder, refusal


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)


REFUSED = [
    ("--offload-train", "none can sleep meanwhile"),
    ("--colocate --offload", "none can sleep meanwhile"),
    ("--weight-sync single-copy --colocate --train-backend hf", "a step is changing"),
    ("--max-staleness 0 --update-weights-interval 2", "newer than all tokens"),
    ("--max-staleness 0 --partial-rollout", "a response that is continued has older tokens"),
    ("--max-staleness 2 --rollout-function-path tests.e2e.background_rollout.rollout", "makes whole rounds"),
    ("--stale-groups requeue", "has no effect without --max-staleness"),
    ("--max-staleness -1", "--max-staleness"),
]


@pytest.mark.parametrize("words, why", REFUSED)
def test_what_cannot_be_is_refused(words: str, why: str) -> None:
    assert why in refusal(words, command="train-async")


@pytest.mark.parametrize("words", ["--max-staleness 1", "--stale-groups drop", "--update-weights-interval 2"])
def test_other_commands_do_not_take_the_flags(words: str) -> None:
    assert "acts in `instep train-async` only" in refusal(words)


def test_slimes_default_is_what_every_other_run_does() -> None:
    assert parse(argv("--update-weights-interval 1")).update_weights_interval == 1


def test_trainer_and_engines_that_share_gpus_do_not_sleep() -> None:
    args = parse(argv("--colocate --device cuda"), "train-async")
    assert not args.offload_train and not args.offload_rollout
    assert parse(argv("--colocate --device cuda")).offload_train


def test_what_is_trained_on_is_not_on_policy() -> None:
    steps = "--num-steps-per-rollout 1 --use-opsm"
    assert "--use-opsm" in refusal(steps) and "--use-opsm" in refusal(
        f"{steps} --max-staleness 0", command="train-async"
    )
    assert parse(argv(steps), "train-async").use_opsm


@pytest.mark.parametrize("flag", ["--rollout-top-p 0.9", "--rollout-top-k 20"])
def test_a_truncated_distribution_is_no_base_for_the_ratio_to_older_weights(flag: str) -> None:
    def told(words: str, command: str = "train-async") -> bool:
        return any("no base for a ratio" in note for note in parse(argv(f"{flag} {words}"), command).notes)

    assert told("") and told("--max-staleness 2") and told("--partial-rollout", "train")
    assert not told("--max-staleness 0") and not told("", "train")
    assert "every ratio would be biased" in refusal(f"{flag} --use-tis", command="train-async")


def test_flags_without_effect_are_told() -> None:
    notes = parse(argv("--max-staleness 1 --over-sampling-batch-size 64"), "train-async").notes
    assert any("--over-sampling-batch-size" in note and "no effect" in note for note in notes)


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"update_weights_interval": 3}, [2, 5]),
        ({"update_weights_interval": 3, "save": "x", "save_interval": 2}, [1, 2, 3, 5, 6]),
        ({"update_weights_interval": 4, "eval_interval": 5}, [3, 4, 6]),
    ],
)
def test_a_sync_comes_before_a_checkpoint_and_an_evaluation(more: dict[str, object], expected: list[int]) -> None:
    defaults = dict(update_weights_interval=1, save=None, save_hf=None, critic_save=None, save_interval=None)
    args = SimpleNamespace(**{**defaults, "eval_interval": None, **more})
    assert [i for i in range(7) if syncs_after(args, i, 7)] == expected  # type: ignore[arg-type]
