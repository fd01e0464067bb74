"""The rollout function for samples from Atropos' environments, in the batches of their API."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from instep.arguments.model import known_config
from instep.arguments.rollout import context_of_model
from instep.arguments.settings import HookSettings
from instep.errors import RolloutError
from instep.rollout import runtime
from instep.rollout.eval import evaluate
from instep.rollout.tokens import tokenizer_of
from instep.rollout.vllm_rollout import MAX_FAILURES_SHOWN, MIN_FAILURES
from instep.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, reward_of
from instep_neighbours.atropos.batches import Registration
from instep_neighbours.atropos.client import LONGEST_PAUSE, ApiClient
from instep_neighbours.atropos.groups import EXTRA, Limits, fault_of_group, refused_in, samples_of, size_of

logger = logging.getLogger(__name__)

SCORES, ADVANTAGES = "instep_neighbours.atropos.normalized_scores", "instep_neighbours.atropos.advantages"
NO_LIMIT = -1  # as max_token_len: environments drop nothing for its length
_CLIENT = "atropos_client"  # the attribute of the run's data source that keeps it between rounds


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return one batch of the API at `--atropos-url`: `--rollout-batch-size` x `--n-samples-per-prompt` sequences.

    Environments decide the size of groups. The first call registers this run as the API's trainer. Environments
    evaluate themselves; `evaluation` is the run's own, on its own data.

    Raises:
        EngineError, RolloutError: no batch came in time (`--atropos-timeout`), or a group cannot be trained on. With
            `--skip-failed-groups` such groups are dropped, and others replace them.
    """
    if evaluation:
        return evaluate(args, rollout_id)
    client = getattr(data_source, _CLIENT, None)
    if client is None:
        client = ApiClient(args.atropos_url)
        setattr(data_source, _CLIENT, client)
        if args.pause_mode == "abort" and not args.debug_train_only:
            logger.warning(
                "--pause-mode abort ends the environments' requests at each weight sync, and they use the partial text "
                "as the whole response: give --pause-mode keep, unless they use other engines"
            )
    given, num_refused = runtime.run(_batch(args, client, registration_of(args, rollout_id)))
    # Groups get the numbers after those in the ledger: none is open when a round starts.
    first, index = data_source.ledger.num_issued, rollout_id * batch_size_of(args)
    groups: list[Group] = []
    for number, group in enumerate(given, first):
        groups.append(samples_of(group, number, index, temperature=args.rollout_temperature))
        index += size_of(group)
    if not {args.custom_reward_post_process_path, args.custom_advantage_function_path} & {SCORES, ADVANTAGES}:
        for sample in (s for group in groups for s in group):  # counts in the comparison, and is not trained on
            sample.remove_sample = sample.extra[EXTRA]["zero"]
    add_texts(tokenizer_of(args), groups)
    for name in {name for group in groups for name in group[0].extra[EXTRA].get("unused", ())} - client.reported:
        client.reported.add(name)  # Atropos' own trainer ignores it, too
        logger.warning("environments send %s, which has no effect here", name)
    return RolloutFnTrainOutput(groups, _metrics(groups, num_refused))


def batch_size_of(args: HookSettings) -> int:
    """Return the number of sequences of a rollout, which is a batch of the API."""
    return args.rollout_batch_size * args.n_samples_per_prompt


def limits_of(args: HookSettings) -> Limits:
    """Return the limits of the run's model, as far as flags and its config.json show them."""
    config = known_config(args)
    vocab_size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    known = [n for n in (args.rollout_max_context_len, context_of_model(args)) if n is not None]
    return Limits(min(known, default=None), vocab_size)


def registration_of(args: HookSettings, rollout_id: int) -> Registration:
    """Return the registration of the run, before the rollout with this number."""
    return Registration(
        wandb_group=args.wandb_group or "",
        wandb_project=args.wandb_project or "",
        batch_size=batch_size_of(args),
        max_token_len=limits_of(args).num_tokens or NO_LIMIT,
        checkpoint_dir=str(Path(args.save or args.run_dir).absolute()),
        save_checkpoint_interval=args.save_interval or args.num_rollout,
        starting_step=rollout_id,
        num_steps=args.num_rollout,
    )


async def _batch(args: HookSettings, client: ApiClient, registration: Registration) -> tuple[list[dict[str, Any]], int]:
    """Return the groups of one rollout, and the number of dropped groups.

    Raises:
        EngineError, RolloutError: no batch came; too many groups were refused (with `--skip-failed-groups`: more than
            `MIN_FAILURES`, than a rollout has, and than were kept); or for `--atropos-timeout` no group was small
            enough to replace a dropped one.
    """
    limits, missing, num_refused = limits_of(args), registration.batch_size, 0
    takes_advantages = args.custom_advantage_function_path == ADVANTAGES
    out: list[dict[str, Any]] = []
    kept_at = time.monotonic()
    while missing:
        too_many, num_kept = [], len(out)
        for group in await client.next_batch(registration, args.atropos_timeout):
            if fault := fault_of_group(group) or refused_in(group, limits, takes_advantages=takes_advantages):
                num_refused += 1
                _refuse(args, group, fault, client.url, num_refused, len(out))
            elif size_of(group) > missing:
                too_many.append(group)
            else:
                out.append(group)
                missing -= size_of(group)
        await client.give_back(too_many)  # others have replaced the dropped groups
        if len(out) > num_kept:
            kept_at = time.monotonic()
        elif too_many:
            if time.monotonic() - kept_at > args.atropos_timeout:
                raise RolloutError(
                    f"no group of at most {missing} sequences came within {args.atropos_timeout:.0f} s, to "
                    f"replace dropped groups ({num_refused})",
                    where=client.url,
                    remedy="correct the environment whose groups are refused (a warning names it), or give all groups "
                    "one size; --atropos-timeout is the limit",
                )
            await asyncio.sleep(LONGEST_PAUSE)
    return out, num_refused


def _refuse(args: HookSettings, group: Any, fault: str, url: str, num_refused: int, num_kept: int) -> None:
    env = group.get("env_id") if isinstance(group, dict) else None
    where = f"a group of {'an environment' if env is None else f'environment {env}'} of the Atropos API at {url}"
    if not args.skip_failed_groups:
        remedy = "correct the environment; --skip-failed-groups drops such groups"
        raise RolloutError(fault, where=where, remedy=remedy)
    if num_refused > max(MIN_FAILURES, args.rollout_batch_size, num_kept):
        what = f"{num_refused} groups of a rollout are refused and {num_kept} kept; the last: {fault}"
        raise RolloutError(what, where=where, remedy="correct the environment")
    if num_refused <= MAX_FAILURES_SHOWN:
        logger.warning("%s is dropped: %s", where, fault)


def add_texts(tokenizer: Any, groups: list[Group]) -> None:
    """Set prompt and response of each sample, for displays and hooks."""
    for sample in (s for group in groups for s in group):
        sample.prompt = tokenizer.decode(sample.tokens[: sample.prompt_length])
        sample.response = tokenizer.decode(sample.tokens[sample.prompt_length :])


def _metrics(groups: list[Group], num_refused: int) -> dict[str, float]:
    """Return the number of dropped groups, each environment's share of the sequences, and their mean score."""
    scores: dict[str, list[float]] = {}
    for sample in (s for group in groups for s in group):
        scores.setdefault(f"atropos/env_{sample.extra[EXTRA]['env_id']}", []).append(reward_of(sample))
    total = sum(map(len, scores.values()))
    out = {f"{name}_share": len(values) / total for name, values in scores.items()}
    out |= {f"{name}_score": sum(values) / len(values) for name, values in scores.items()}
    return {**out, "atropos/num_groups": float(len(groups)), "atropos/num_refused": float(num_refused)}
