"""The format of the rows of a command line: its columns, and the built-in reward that grades them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instep.algorithms.catalog import DEFAULT_ROLLOUT, DPO_ROLLOUT, SFT_ROLLOUT
from instep.arguments.settings import HookSettings, Settings
from instep.data.rows import RowFormat


@dataclass(frozen=True)
class EvalDataset:
    """One data set of the evaluation. Its fields default to the flags `--eval-*`, then to `--rollout-*`."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int | None
    max_prompt_len: int | None
    max_context_len: int | None
    min_new_tokens: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    rm_type: str | None
    reward_key: str | None
    custom_rm_path: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any]


def row_format(args: Settings) -> RowFormat:
    """Return the row format of `--prompt-data`: prompts, conversations (`instep sft`) or pairs (`instep dpo`)."""
    function = args.rollout_function_path
    pair_keys = (args.chosen_key, args.rejected_key) if function == DPO_ROLLOUT else None
    keys = (args.input_key, args.label_key, args.metadata_key, args.tool_key)
    asked = function == DEFAULT_ROLLOUT and not _made_by_hooks(args)
    grader = (args.rm_type or "") if asked and args.custom_rm_path is None else None
    return RowFormat(*keys, function == SFT_ROLLOUT, pair_keys, grader, asked)


def eval_row_format(args: HookSettings | Settings, dataset: EvalDataset) -> RowFormat:
    """Return the row format of an evaluation data set."""
    keys = (dataset.input_key, dataset.label_key, dataset.metadata_key, dataset.tool_key)
    function = args.eval_function_path or args.rollout_function_path
    own = dataset.custom_generate_function_path is not None or _made_by_hooks(args)
    # the set's own rm_type has priority over the run's --custom-rm-path
    custom = dataset.custom_rm_path is not None and (
        dataset.custom_rm_path != args.custom_rm_path or dataset.rm_type == args.rm_type
    )
    asked = function == DEFAULT_ROLLOUT and not own
    rule = dataset.metadata_overrides.get("rm_type") or dataset.rm_type or ""
    return RowFormat(*keys, grader=str(rule) if asked and not custom else None, asked=asked)


def _made_by_hooks(args: HookSettings | Settings) -> bool:
    """Return whether a hook sees the samples before the reward: it may set labels, or the reward itself."""
    return args.custom_generate_function_path is not None or bool(args.rollout_sample_hook_path)
