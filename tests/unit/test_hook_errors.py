"""Every function that a user can name: what it raises, and what it returns wrongly, is one error that says where.

`WAYS` has a way to each flag's call as a run makes it; `WRONG` what functions return that cannot be used.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.arguments.all_flags import find, groups
from instep.arguments.flag import hook as hook_type
from instep.arguments.parse import parse
from instep.controller.advantage_columns import add_advantages
from instep.controller.round_metrics import logs_evaluation, metrics_of_rollout
from instep.controller.run_state import source_state
from instep.data.conversion import read_conversion
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.source import load_source
from instep.errors import InstepError
from instep.rollout.outputs import as_eval_output, as_train_output
from instep.rollout.vllm_rollout import generate_rollout
from instep.system.hooks import Hook, load_function
from instep.training.backend import TokenOutputs
from instep.training.loss_hooks import LossHooks, custom_loss_fn
from instep.training.megatron.hooks import MegatronHooks
from instep.training.postprocess import postprocessed
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Status, TokenBatch
from tests.assets import make_checkpoint, make_prompts

ME = "hooks_of_this_test.function"
current: dict[str, Any] = {}  # what `function` of that module does


def done(index: int, **more: Any) -> Sample:
    more = {"tokens": [1, 2, 3], "response_length": 2, "reward": 1.0, "status": Status.COMPLETED, **more}
    return Sample(group_index=0, index=index, **more)


async def good_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens = [5, 6]
    sample.append_response_tokens([7, 2], [-1.0, -1.0])
    sample.response, sample.status = "x", Status.COMPLETED
    return sample


async def good_reward(args: Any, sample: Any) -> Any:
    return float(sample.index % 2) if isinstance(sample, Sample) else [float(s.index % 2) for s in sample]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooks")
    make_checkpoint(folder / "hf")
    make_prompts(folder / "train.jsonl", 8)
    (folder / "hooks_of_this_test.py").write_text(
        "from tests.unit.test_hook_errors import current\n\n\ndef function(*args, **kwargs):\n"
        "    return current['does'](*args, **kwargs)\n\n\ndef takes_nine(a, b, c, d, e, f, g, h, i):\n    pass\n"
    )
    return folder


@pytest.fixture
def parsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(folder)
    load_function.cache_clear()

    def make(*more: str) -> Any:
        line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --input-key prompt --label-key label "
        line += "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 1 --actor-num-gpus-per-node 1 "
        line += (
            f"--device cpu --apply-chat-template --rollout-max-response-len 8 --custom-rm-path {__name__}.good_reward"
        )
        return parse([*line.split(), *more], "train")

    return make


# ---- the way to each call --------------------------------------------------------------------------------------------


def whole_rollout(args: Any) -> None:
    """The default rollout function; no engine is asked, because the generate function is the test's."""
    view = args.view({"rollout_engine_urls": []})
    as_train_output(generate_rollout(view, 0, LedgeredDataSource(load_source(args, view), Ledger())))


def in_a_rollout(flag: str) -> Callable[[Callable[..., Any]], None]:
    def way(make: Callable[..., Any]) -> None:
        generate = [] if flag == "--custom-generate-function-path" else [f"{__name__}.good_generate"]
        whole_rollout(make(flag, ME, *(["--custom-generate-function-path", *generate] if generate else [])))

    return way


def data_source(make: Callable[..., Any]) -> None:
    args = make("--data-source-path", ME)
    source = load_source(args, args.view({}))
    LedgeredDataSource(source, Ledger()).get_samples(2)
    source_state(source, 0)


def rollout_function(make: Callable[..., Any]) -> None:
    hook = Hook("--rollout-function-path", make("--rollout-function-path", ME).rollout_function_path)
    as_train_output(hook.call(None, 0, None, evaluation=False), hook)


def eval_function(make: Callable[..., Any]) -> None:
    hook = Hook("--eval-function-path", make("--eval-function-path", ME, "--eval-interval", "1").eval_function_path)
    as_eval_output(hook.call(None, 0, None, evaluation=True), hook)


def rollout_log(make: Callable[..., Any]) -> None:
    args = make("--custom-rollout-log-function-path", ME)
    metrics_of_rollout(args.view({}), 3, RolloutFnTrainOutput([[done(0)]]), 1.0)


def eval_log(make: Callable[..., Any]) -> None:
    args = make("--custom-eval-rollout-log-function-path", ME)
    logs_evaluation(args.view({}), 3, RolloutFnEvalOutput({"a": {"rewards": [1.0]}}))


def batch() -> TokenBatch:
    ones = torch.ones(4)
    columns = {n: ones.clone() for n in ("loss_mask", "log_probs", "rollout_log_probs", "advantages", "loss_weights")}
    ids = {"group_index": torch.tensor([0, 0]), "index": torch.tensor([0, 1]), "execution_id": ["a", "b"]}
    ids |= {"rewards": torch.tensor([0.0, 1.0]), "loss_scale": torch.ones(2)}
    return TokenBatch(torch.arange(6), torch.tensor([3, 3]), torch.tensor([2, 2]), columns, ids)


def advantages(flag: str) -> Callable[[Callable[..., Any]], None]:
    def way(make: Callable[..., Any]) -> None:
        args = make(flag, ME)
        add_advantages(batch(), [done(0), done(1)], args, args.view({}))

    return way


def conversion(make: Callable[..., Any]) -> None:
    flag = "--custom-convert-samples-to-train-data-path"
    args = make(flag, ME)
    samples = [done(0), done(1)]
    hook = Hook(flag, args.custom_convert_samples_to_train_data_path)
    answer = hook.call(args.view({}), samples)
    read_conversion(hook, answer, samples, needs_reward=True, global_batch_size=2)


def loss(flag: str, *more: str) -> Callable[[Callable[..., Any]], None]:
    def way(make: Callable[..., Any]) -> None:
        args, whole, four = make(flag, ME, *more), batch(), torch.ones(4)
        hooks = LossHooks.from_args(args)
        if correct := hooks.correction(whole):
            correct(four, four, four, four)
        elif reduce := hooks.reduction(whole):
            reduce(four, four)
        else:
            custom_loss_fn(args)(whole, TokenOutputs(four, logits=torch.zeros(1, 6, 8)))

    return way


GROUP = [done(0), done(1)]


def megatron(flag: str, call: Callable[[MegatronHooks], None]) -> Callable[[Callable[..., Any]], None]:
    return lambda make: call(MegatronHooks.from_args(make("--train-backend", "megatron", flag, ME)))


WAYS: dict[str, Callable[[Callable[..., Any]], None]] = {
    "--data-source-path": data_source,
    "--rollout-function-path": rollout_function,
    "--eval-function-path": eval_function,
    "--custom-rollout-log-function-path": rollout_log,
    "--custom-eval-rollout-log-function-path": eval_log,
    **{
        flag: megatron(flag, call)
        for flag, call in {
            "--custom-megatron-init-path": lambda hooks: hooks.started(),
            "--custom-megatron-before-log-prob-hook-path": lambda hooks: hooks.before_log_probs([], ""),
            "--custom-megatron-before-train-step-hook-path": lambda hooks: hooks.before_step(0, 0, [], None),
            "--custom-model-provider-path": lambda hooks: hooks.build(dict, lambda *_: {}, True, True, 0),
            "--spec": lambda hooks: hooks.layers(dict, {}, None),
        }.items()
    },
    "--custom-convert-samples-to-train-data-path": conversion,
    "--custom-tis-function-path": loss("--custom-tis-function-path", "--use-tis"),
    "--custom-pg-loss-reducer-function-path": loss("--custom-pg-loss-reducer-function-path"),
    "--custom-loss-function-path": loss("--custom-loss-function-path", "--loss-type", "custom_loss"),
    **{f: advantages(f) for f in ("--custom-reward-post-process-path", "--custom-advantage-function-path")},
    **{
        f: in_a_rollout(f)
        for f in (
            *("--custom-generate-function-path", "--custom-rm-path", "--rollout-sample-hook-path"),
            *("--dynamic-sampling-filter-path", "--rollout-sample-filter-path", "--rollout-all-samples-process-path"),
        )
    },
}


def postprocess(make: Callable[..., Any]) -> None:
    postprocessed(make("--rollout-data-postprocess-path", ME), 3, batch())


WAYS["--rollout-data-postprocess-path"] = postprocess


def buffer_filter(make: Callable[..., Any]) -> None:
    args = make("--buffer-filter-path", ME)
    source = load_source(args, args.view({}))
    source.add_samples(source.get_samples(2))
    source.get_samples(1)


WAYS["--buffer-filter-path"] = buffer_filter


class Source:
    """A data source whose `get_samples` and `state_dict` return what they are told."""

    def __init__(self, samples: Any, state: Any = None):
        self.samples, self.state = samples, state

    def get_samples(self, num_groups: int) -> Any:
        return self.samples() if callable(self.samples) else self.samples

    def state_dict(self) -> Any:
        return self.state


async def not_awaited(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def sets(name: str, value: Any) -> Callable[..., None]:
    return lambda *args: args[-1].__setitem__(name, value)  # in rollout_data


def drops(name: str) -> Callable[..., None]:
    return lambda *args: args[-1].pop(name)


def fails(*_: Any, **__: Any) -> Any:
    raise LookupError("of the user")


def metrics(value: Any) -> RolloutFnTrainOutput:
    return RolloutFnTrainOutput([GROUP], value)


def tensors(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


# flag -> what its function returns that cannot be used: a value, or (for a function that is called) a callable
WRONG: dict[str, list[Any]] = {
    "--data-source-path": [
        *(Source(v) for v in (None, 3, [None], [[]], [[1]], [[Sample()]], [GROUP[0]], fails)),
        Source([GROUP], {"a": {1, 2}}),
        SimpleNamespace(),
    ],
    "--rollout-function-path": [None, 3, {}, [None], [[]], [[1]], [[done(0, loss_mask=[1])]], [[Sample()]], not_awaited]
    + [metrics("high"), metrics({"a": "high"}), metrics({"a": None}), RolloutFnTrainOutput(None)],
    "--eval-function-path": [None, 3, {}, {"a": 3}, {"a": {}}, {"a": {"rewards": 3}}, {"a": {"samples": [1]}}]
    + [{"a": {"rewards": [None]}}, RolloutFnEvalOutput({"a": {"rewards": [1.0]}}, "x"), RolloutFnEvalOutput(None)],
    "--custom-rollout-log-function-path": [not_awaited],
    "--custom-eval-rollout-log-function-path": [not_awaited],
    "--custom-generate-function-path": [None, 3, [], [None], Sample()],
    "--custom-rm-path": [None, "1.0", float("nan"), {"score": 1.0}, [1.0, 2.0]],
    "--rollout-sample-hook-path": [3, [], "x", Sample(index=5)],
    "--dynamic-sampling-filter-path": [None, 2, "keep", (True, "x")],
    "--rollout-sample-filter-path": [],  # what these two return is not looked at
    "--rollout-all-samples-process-path": [],
    "--buffer-filter-path": [None, 3, [None], [[]], [[3]], [GROUP] * 5, not_awaited],
    "--custom-reward-post-process-path": [None, [1.0, 2.0], (1.0, 2.0), ([], []), ([], [1.0, None]), ([], None)],
    "--custom-advantage-function-path": [None, sets("advantages", 3), sets("advantages", [None, None])]
    + [sets("advantages", [tensors(3), tensors(2)]), sets("advantages", [tensors(2)]), sets("advantages", "x")],
    "--custom-convert-samples-to-train-data-path": [None, 3, [], {}, {"tokens": 3}, not_awaited],  # test_conversion.py
    "--rollout-data-postprocess-path": [sets("advantages", 3), sets("advantages", [tensors(2)]), sets("tokens", None)]
    + [sets("loss_masks", [tensors(3), tensors(2)]), sets("total_lengths", [9, 9]), sets("mine", [1]), sets("mine", 1)]
    + [sets("loss_masks", None), drops("loss_masks"), drops("tokens"), not_awaited],
    "--custom-megatron-init-path": [],  # what it returns is not used
    "--custom-megatron-before-log-prob-hook-path": [],
    "--custom-megatron-before-train-step-hook-path": [],
    "--custom-model-provider-path": [None, 3, []],
    "--spec": [None, 3, fails],
    "--custom-tis-function-path": [None, 3, (tensors(4), [tensors(4)]), (tensors(3), [tensors(4)], {})]
    + [
        (tensors(4), None, {}),
        (tensors(4), [tensors(4)], {"a": 1.0}),
        (tensors(4), [tensors(4)], {"loss": tensors(4)}),
    ],
    "--custom-pg-loss-reducer-function-path": [None, 3, lambda *_: lambda x: x, lambda *_: lambda x: None]
    + [lambda *_: fails],
    "--custom-loss-function-path": [None, 3, (tensors(4), {}), (tensors(1), None), (1.0, {}), (tensors(1), {"a": "x"})],
}


def test_the_tables_have_every_flag_that_takes_a_function() -> None:
    flags = {
        flag.name for group in groups() for flag in group.flags if flag.type is hook_type and flag.status == "acts"
    }
    assert flags == set(WAYS) == set(WRONG)


def error_of(flag: str, make: Callable[..., Any], does: Callable[..., Any]) -> str:
    current["does"] = does
    with pytest.raises(InstepError) as caught:
        WAYS[flag](make)
    error = caught.value
    for part in (error.what, error.where, error.remedy):
        assert part, f"{flag}: {error}"
    assert f"{flag} {ME}" in error.where, f"{flag}: {error}"
    return str(error)


@pytest.mark.parametrize("flag", WAYS)
def test_what_a_hook_raises_is_named(flag: str, parsed: Callable[..., Any]) -> None:
    said = error_of(flag, parsed, fails)
    assert "LookupError('of the user')" in said and "hooks_of_this_test.py:5" in said, said


@pytest.mark.parametrize(
    "flag",
    ["--rollout-function-path", "--dynamic-sampling-filter-path", "--custom-rm-path", "--custom-tis-function-path"],
)
def test_a_function_of_another_signature_is_told_the_right_one(
    flag: str, parsed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(ME.partition(".")[0])
    monkeypatch.setattr(module, "function", module.takes_nine)
    said = error_of(flag, parsed, fails)
    assert "the definition of takes_nine" in said and f"it is called as {find(flag).help}" in said, said


@pytest.mark.parametrize("flag", [flag for flag, values in WRONG.items() if values])
def test_what_a_hook_returns_wrongly_is_named(flag: str, parsed: Callable[..., Any]) -> None:
    for value in WRONG[flag]:
        said = error_of(flag, parsed, value if inspect.isfunction(value) else constantly(value))
        assert "hooks_of_this_test.py:" in said or "test_hook_errors.py:" in said, said


def constantly(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def test_a_rollout_function_without_metrics_is_fine(parsed: Callable[..., Any]) -> None:
    """slime's RolloutFnTrainOutput has metrics=None."""
    hook = Hook("--rollout-function-path", parsed("--rollout-function-path", ME).rollout_function_path)
    assert as_train_output(RolloutFnTrainOutput([[done(0)]], None), hook).metrics == {}


def test_a_data_source_of_the_users_keeps_its_own_ways(parsed: Callable[..., Any]) -> None:
    made = Source([GROUP], {"next": 3})
    current["does"] = lambda args: made
    args = parsed("--data-source-path", ME)
    source = load_source(args, argparse.Namespace())
    assert source.get_samples(1) == [GROUP] and source.state_dict() == {"next": 3}
    assert not hasattr(source, "cursor") and not hasattr(source, "add_samples")
    LedgeredDataSource(source, Ledger()).mine = 7
    assert made.mine == 7 and source.mine == 7 and json.dumps(source_state(source, 0)) == '{"next": 3}'
