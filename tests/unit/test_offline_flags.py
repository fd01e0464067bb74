"""`instep sft` and `instep dpo` sample nothing: flags of rollouts, rewards, evaluations, engines act or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.arguments.engine import ENGINE
from instep.arguments.evaluation import EVAL
from instep.arguments.flag import Flag
from instep.arguments.parse import parse
from instep.arguments.reward import REWARD
from instep.arguments.rollout import ROLLOUT
from instep.controller.round import TrainingRound
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import ConfigError
from instep.rollout.sft_rollout import generate_rollout
from tests.command_line import argv, make_folder

ACT = {"--rollout-function-path", "--rollout-max-prompt-len", "--custom-rollout-log-function-path"}
ACT |= {"--vllm-max-model-len"}  # long contexts may have rotary positions of their own
FLAGS = [flag for group in (ROLLOUT, REWARD, EVAL, ENGINE) for flag in group.flags if flag.status == "acts"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def answer(command: str, words: list[str]) -> str:
    """What is wrong with the command line; empty if nothing is."""
    try:
        parse([*argv(without="--rm-type --label-key"), *words], command)
    except ConfigError as error:
        return str(error)
    return ""


def possible(flag: Flag) -> list[list[str]]:
    """Values of which at least one can be read."""
    if flag.is_switch:
        return [[flag.name]]
    values = [
        *map(str, flag.choices),
        "2",
        "8000",
        "0.5",
        "tests.loss_hooks.ppo_loss",
        "http://a:1",
        "math",
        "data.jsonl",
    ]
    return [[flag.name, value] for value in values]


@pytest.mark.parametrize(
    ("flag", "command"),  # one table for both commands: of `dpo` every sixth flag, the others are slow
    [pytest.param(flag, "sft", id=f"{flag.name}-sft") for flag in FLAGS]
    + [
        pytest.param(flag, "dpo", id=f"{flag.name}-dpo", marks=pytest.mark.slow if number % 6 else ())
        for number, flag in enumerate(FLAGS)
    ],
)
def test_each_flag_acts_or_is_refused(flag: Flag, command: str) -> None:
    answers = [answer(command, words) for words in possible(flag)]
    assert ("" in answers) == (flag.name in ACT)
    if flag.name not in ACT:
        assert any(f"`instep {command}` samples nothing" in a or "there is no engine" in a for a in answers), answers


def test_cross_entropy_has_no_temperature() -> None:
    assert "--rollout-temperature" in answer("sft", ["--rollout-temperature", "0.5"])
    own = ["--rollout-function-path", "tests.unit.test_offline_flags.one_conversation", "--rollout-temperature", "0.5"]
    args = parse(
        [*argv(without="--rm-type --label-key"), *own], "sft"
    )  # a function of the user's may read it; the loss does not

    class Stop(Exception):
        pass

    def plan(batch: object) -> None:
        assert batch.sample_columns["temperature"].tolist() == [1.0]  # type: ignore[attr-defined]
        raise Stop

    from tests.unit.test_batch import make_sample

    sample = make_sample(0, 0, 2, 3, log_probs=False)
    sample.sampling_params = {}
    with pytest.raises(Stop):
        TrainingRound(args, args.view({}), SimpleNamespace(plan=plan)).run([[sample]], 0)  # type: ignore[arg-type]


def one_conversation(*_: object, **__: object) -> None:
    """Stands for a rollout function of the user's."""


def test_long_conversations_are_left_out(tmp_path: Path) -> None:
    from tests.assets import make_checkpoint

    make_checkpoint(tmp_path / "hf", layers=1)
    rows = [
        {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": text}]}
        for text in ("2", "3" * 200)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--hf-checkpoint {tmp_path}/hf --prompt-data talks.jsonl --input-key messages --rollout-max-prompt-len 100"
    args = parse([*argv(without="--rm-type --label-key --hf-checkpoint --prompt-data"), *words.split()], "sft")
    source = RolloutDataSourceWithBuffer(args)
    assert len(source) == 1
    output = generate_rollout(args.view({}), 0, source)
    assert len({len(group[0].tokens) for group in output.samples}) == 1  # type: ignore[union-attr]
    text = answer("sft", ["--rollout-max-context-len", "100"])
    assert "--rollout-max-prompt-len leaves out conversations of more tokens" in text
