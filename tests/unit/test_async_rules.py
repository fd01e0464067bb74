"""The flags of `instep train-async`, and when it syncs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import instep
from instep.arguments.parse import parse
from instep.engines.kind import _built_in
from instep.engines.vllm import VllmKind
from instep.errors import ConfigError
from instep.train_async import syncs_after
from tests.command_line import argv, make_folder, refusal


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)


PREFILL = "--rollout-backend vllm --prefill-num-servers 1 --rollout-num-gpus 2"
REFUSED = [
    ("--offload-train", "neither can sleep"),
    ("--colocate --offload", "neither can sleep"),
    ("--weight-sync single-copy --colocate --train-backend hf", "a step is changing"),
    ("--max-staleness 0 --update-weights-interval 2", "newer than all tokens"),
    ("--max-staleness 0 --partial-rollout", "a continued response has older tokens"),
    ("--max-staleness 2 --rollout-function-path tests.e2e.background_rollout.rollout", "generates whole rollouts"),
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


@pytest.mark.parametrize(
    "words, command, mode",
    [
        ("", "train", "abort"),
        ("--pause-mode keep", "train", "keep"),
        ("", "train-async", "abort"),
        ("--max-staleness 0", "train-async", "abort"),
        ("--max-staleness 2", "train-async", "keep"),
        ("--max-staleness 2 --rollout-backend embedded --rollout-stop END", "train-async", "keep"),
        ("--max-staleness 2 --colocate --device cuda", "train-async", "keep"),
        ("--max-staleness 2 --pause-mode abort", "train-async", "abort"),
        ("--max-staleness 2 --pause-mode wait", "train-async", "wait"),
        ("--max-staleness 2 --deterministic-mode", "train-async", "abort"),
        ("--max-staleness 2 --weight-sync restart", "train-async", "abort"),
        (f"--max-staleness 2 {PREFILL}", "train-async", "abort"),
        ("--max-staleness 2 --rollout-external-engine-addrs 127.0.0.1:8000", "train-async", "abort"),
    ],
)
def test_responses_stay_in_the_engine_where_they_live_through_syncs(words: str, command: str, mode: str) -> None:
    args = parse(argv(words), command)
    assert args.pause_mode == mode
    assert not [note for note in args.notes if "keep" in note]


@pytest.mark.parametrize(
    "version, words, mode",
    [
        ("0.26.0", "", "keep"),
        ("0.26.0", "--no-fast-log-probs", "abort"),
        ("0.26.0", "--rollout-stop END", "abort"),  # which is asked for in JSON
        ("0.26.0", "--custom-generate-function-path json.dumps", "abort"),  # maybe, too
        ("0.32.0+cpu", "--rollout-stop END", "keep"),
        ("0.32.0+cpu", "--no-fast-log-probs", "keep"),
        (None, "", "keep"),  # of `auto` the other kind is left, which can
    ],
)
def test_they_stay_where_the_engine_tells_versions(
    version: str | None, words: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(where: str) -> None:
        if version is None:
            raise ConfigError("not installed", where=where, remedy="install it")

    kind = VllmKind(version or "")
    monkeypatch.setattr(kind, "check_installed", installed)
    monkeypatch.setattr("instep.engines.vllm.KIND", kind)
    _built_in.cache_clear()
    try:
        assert parse(argv(f"--max-staleness 2 {words}"), "train-async").pause_mode == mode
    finally:
        _built_in.cache_clear()


def test_what_is_trained_on_is_not_on_policy() -> None:
    steps = "--num-steps-per-rollout 1 --use-opsm"
    assert "--use-opsm" in refusal(steps) and "--use-opsm" in refusal(
        f"{steps} --max-staleness 0", command="train-async"
    )
    assert parse(argv(steps), "train-async").use_opsm


@pytest.mark.parametrize("flag", ["--rollout-top-p 0.9", "--rollout-top-k 20"])
def test_a_truncated_distribution_is_no_base_for_the_ratio_to_older_weights(flag: str) -> None:
    def told(words: str, command: str = "train-async") -> bool:
        return any("cannot be the base of a ratio" in note for note in parse(argv(f"{flag} {words}"), command).notes)

    assert told("") and told("--max-staleness 2") and told("--partial-rollout", "train")
    assert not told("--max-staleness 0") and not told("", "train")
    assert "every ratio would be biased" in refusal(f"{flag} --use-tis", command="train-async")


def test_flags_without_effect_are_told() -> None:
    notes = parse(argv("--max-staleness 1 --over-sampling-batch-size 64"), "train-async").notes
    assert any("--over-sampling-batch-size" in note and "no effect" in note for note in notes)


@pytest.mark.parametrize("name", ["train_sync.py", "train_async.py"])
def test_the_loops_can_be_read_at_a_glance(name: str) -> None:
    assert len(Path(instep.__file__).with_name(name).read_text().splitlines()) < 100


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
