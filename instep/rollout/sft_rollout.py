"""The rollout function of supervised fine-tuning. It takes conversations from the data source."""

from __future__ import annotations

import copy
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.chat import conversation_samples
from instep.errors import DataError
from instep.rollout.eval import evaluate
from instep.rollout.outputs import taken_from
from instep.rollout.tokens import tokenizer_of, where_of
from instep.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Status


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return `--rollout-batch-size` conversations as groups, with tokens and loss mask; the reward is 0.

    A conversation is one sample, or several fan-out siblings of one execution if its turns need that
    (`conversation_samples`). A step counts it once in any case.

    Raises:
        DataError: a prompt is not a conversation with an assistant turn to train on.
    """
    if evaluation:
        return evaluate(args, rollout_id)
    groups = taken_from(data_source, args.rollout_batch_size)
    return RolloutFnTrainOutput([_tokenized(args, group[0]) for group in groups])


def _tokenized(args: HookSettings, sample: Sample) -> Group:
    if isinstance(sample.prompt, str):
        what, remedy = "the prompt is text, not a conversation", "give messages, without --apply-chat-template"
        raise DataError(what, where=f"{where_of(sample)}: {sample.prompt[:80]!r}", remedy=remedy)
    samples = conversation_samples(
        sample.prompt,
        tokenizer_of(args),
        sample.metadata.get("tools"),
        loss_mask_type=args.loss_mask_type,
        template_kwargs=args.apply_chat_template_kwargs,
        where=where_of(sample),
    )
    return [as_completed(copy.deepcopy(sample), ids, mask, 0.0) for ids, mask in samples]


def as_completed(sample: Sample, ids: list[int], mask: list[int], reward: float) -> Sample:
    """Return the sample with these token ids. Its response begins at the first token with `mask` 1."""
    sample.tokens, sample.response_length = ids, len(mask) - mask.index(1)
    sample.loss_mask = mask[-sample.response_length :]
    sample.execution_id = f"{sample.group_index}.0"
    sample.reward, sample.status = reward, Status.COMPLETED
    return sample
