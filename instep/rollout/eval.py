"""Evaluation on several data sets at once, each with its own settings."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from instep.arguments.settings import HookSettings
from instep.data.dataset import Record, load_dataset, options_of, tell_of_bos
from instep.data.formats import eval_row_format
from instep.errors import ConfigError, RolloutError
from instep.rollout import runtime
from instep.rollout.execute import Execution, longest_response, new_execution, run_group
from instep.rollout.group_request import generate_group
from instep.rollout.rewards.dispatch import BUILT_IN
from instep.rollout.tokens import tokenizer_of
from instep.system.hooks.neighbours import is_own
from instep.system.run_context import PerRun
from instep.types import Group, RolloutFnEvalOutput, Sample, Status, reward_of

if TYPE_CHECKING:
    from instep.data.formats import EvalDataset

_loaded: PerRun[dict[tuple[Any, ...], list[Record]]] = PerRun(dict)


def read_sets(args: HookSettings) -> None:
    """Read the evaluation sets of a new run. The run keeps them, even if their files change later.

    An evaluation function of the user may read anything, so with one the sets are read only when it asks for them.

    Raises:
        ConfigError, DataError, OutputError: as `load_dataset`.
    """
    _loaded().clear()
    if is_own(str(args.eval_function_path)):
        for dataset in args.eval_datasets:
            _load(args, dataset)


def _load(args: HookSettings, dataset: EvalDataset) -> list[Record]:
    """Return the rows of a data set. It is read once in a run; an evaluation takes all rows at once anyway."""
    options: dict[str, Any] = {"row_format": eval_row_format(args, dataset), **options_of(args)}
    options["max_prompt_len"] = dataset.max_prompt_len
    key = (dataset.path, str(args.hf_checkpoint), repr(options))
    loaded = _loaded()
    if key not in loaded:
        loaded[key] = list(load_dataset(dataset.path, tokenizer=tokenizer_of(args), **options))
        tell_of_bos(args, dataset.path, loaded[key], tokenizer_of(args))
    return loaded[key]


def _sampling_params(args: HookSettings, dataset: EvalDataset) -> dict[str, Any]:
    params = {
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "max_new_tokens": dataset.max_response_len or longest_response(args),
        "min_new_tokens": dataset.min_new_tokens,
        "stop": dataset.stop,
        "stop_token_ids": dataset.stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    return {name: value for name, value in params.items() if value is not None}


def _groups(args: HookSettings, dataset: EvalDataset) -> list[Group]:
    """Return a group of `n_samples_per_eval_prompt` samples for every row."""
    n = dataset.n_samples_per_eval_prompt
    rule = {"rm_type": dataset.rm_type} if dataset.rm_type else {}
    reward_path = dataset.custom_rm_path
    if reward_path == args.custom_rm_path and dataset.rm_type != args.rm_type:
        reward_path = BUILT_IN  # the set's own rm_type has priority over the run's --custom-rm-path
    return [
        [
            Sample(
                group_index=row,
                index=row * n + i,
                prompt=copy.deepcopy(record.prompt),
                label=copy.deepcopy(record.label),
                metadata=copy.deepcopy({**rule, **record.metadata, **dataset.metadata_overrides}),
                generate_function_path=dataset.custom_generate_function_path,
                custom_rm_path=reward_path,
            )
            for i in range(n)
        ]
        for row, record in enumerate(_load(args, dataset))
    ]


def evaluate(args: HookSettings, rollout_id: int) -> RolloutFnEvalOutput:
    """Generate and reward the samples of every row of every set, in row order.

    Sampling seeds do not depend on `rollout_id`, so two evaluations differ only by the policy.

    Returns:
        For each set, by name: `rewards` (floats), `truncated` and `samples`.

    Raises:
        ConfigError: there is no evaluation set.
        EngineError, RewardError, RolloutError: the first error ends the evaluation.
    """
    work = [(d, _groups(args, d)) for d in args.eval_datasets]
    if not work:
        raise ConfigError("there is no evaluation set", where="--eval-prompt-data", remedy="give NAME FILE pairs")
    return runtime.run(run_sets(args, rollout_id, work), timeout=args.rollout_timeout)


async def run_sets(
    args: HookSettings, rollout_id: int, work: list[tuple[EvalDataset, list[Group]]]
) -> RolloutFnEvalOutput:
    """Evaluate these groups of each set, as `evaluate` does."""
    shared = new_execution(args, rollout_id, evaluation=True)
    progress = [0, sum(len(groups) for _, groups in work)]
    results = await runtime.gather([_one_set(shared, d, groups, progress) for d, groups in work])
    return RolloutFnEvalOutput({d.name: result for (d, _), result in zip(work, results, strict=True)})


async def _one_set(shared: Execution, dataset: EvalDataset, groups: list[Group], progress: list[int]) -> dict[str, Any]:
    args = shared.args
    execution = dataclasses.replace(
        shared,
        reward_key=dataset.reward_key or args.reward_key,
        max_context_len=dataset.max_context_len,
        seed_tag=f"eval/{dataset.name}/",
    )
    params = _sampling_params(args, dataset)

    async def one(group: Group) -> Group:
        done = await run_group(execution, group, params, generate_group)
        progress[0] += 1
        runtime.report_progress(progress[0], progress[1], evaluation=dataset.name)
        return done

    samples = [s for group in await runtime.gather([one(g) for g in groups]) for s in group]
    if any(s.status is Status.ABORTED for s in samples):
        raise RolloutError("samples of the evaluation were aborted", where=dataset.name, remedy="run it again")
    return {
        "rewards": [reward_of(s, execution.reward_key) for s in samples],
        "truncated": [s.status is Status.TRUNCATED for s in samples],
        "samples": samples,
    }
