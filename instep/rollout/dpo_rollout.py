"""The rollout function of direct preference optimization. It takes pairs from the data source."""

from __future__ import annotations

import copy
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.chat import tokenize_conversation
from instep.data.tokenizer import text_ids
from instep.errors import DataError, RolloutError
from instep.rollout.outputs import taken_from
from instep.rollout.sft_rollout import as_completed
from instep.rollout.tokens import tokenizer_of, where_of
from instep.system.hooks.user_code import said
from instep.types import Group, RolloutFnTrainOutput, Sample


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return `--rollout-batch-size` pairs, each as a group [chosen, rejected] of one execution with the rewards [1, 0].

    For a response of messages, the loss mask covers its assistant turns, as in SFT. For a text response it covers the
    whole text and the end-of-text token after it. No token of the prompt is trained on.

    Raises:
        DataError: a pair without a trainable token.
    """
    if evaluation:
        raise RolloutError("pairs cannot be used for an evaluation", remedy="remove the evaluation", where="instep dpo")
    groups = taken_from(data_source, args.rollout_batch_size)
    return RolloutFnTrainOutput([_pair(args, group[0]) for group in groups])


def _pair(args: HookSettings, sample: Sample) -> Group:
    where = where_of(sample)
    if not isinstance(sample.label, dict) or not {"chosen", "rejected"} <= sample.label.keys():
        remedy = 'let the data source set label = {"chosen": ..., "rejected": ...}, of the prompt\'s kind'
        raise DataError(f"the sample's label is not a pair: {said(sample.label, 80)}", where=where, remedy=remedy)
    pair = []
    for name, reward in (("chosen", 1.0), ("rejected", 0.0)):
        ids, mask = _tokenized(args, sample, sample.label[name], f"{where}, {name}")
        pair.append(as_completed(copy.deepcopy(sample), ids, mask, reward))
        pair[-1].extra["pair"] = name
    return pair


def _tokenized(args: HookSettings, sample: Sample, response: Any, where: str) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and response, and the loss mask."""
    tokenizer = tokenizer_of(args)
    if isinstance(sample.prompt, list):
        return tokenize_conversation(
            [{**message, "step_loss_mask": 0} for message in sample.prompt] + response,
            tokenizer,
            sample.metadata.get("tools"),
            loss_mask_type=args.loss_mask_type,
            template_kwargs=args.apply_chat_template_kwargs,
            where=where,
        )
    prompt, ids = text_ids(tokenizer, sample.prompt, args.add_bos_token), text_ids(tokenizer, response)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    if not prompt or not ids:
        raise DataError(f"the {'response' if prompt else 'prompt'} has no tokens", where=where, remedy="remove the row")
    return prompt + ids, [0] * len(prompt) + [1] * len(ids)
