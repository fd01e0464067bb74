"""Prompts, batches and the length of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings
from instep.arguments.flag import BATCH, in_one_word, read_flags
from instep.data.named import is_named
from instep.data.rows import ENDINGS, parse_path, split_files
from instep.errors import ConfigError

DATA = read_flags(__file__, in_one_word=in_one_word)


def data_file(path: str, where: str) -> Iterator[Problem]:
    """Check FILE or FILE@[a:b]. Skip a data set of the hub: it is downloaded once the command line is correct."""
    try:
        file, _ = parse_path(path)
    except ConfigError as error:
        yield Problem(error.what, where, error.remedy)
        return
    if is_named(path):
        return
    try:
        open(file, "rb").close()
    except FileNotFoundError:
        yield Problem(f"no file {file}", where, "give the path of a jsonl or parquet file")
    except IsADirectoryError:
        yield Problem(f"{file} is a folder", where, "give the path of a jsonl or parquet file")
    except OSError as error:
        remedy = "change its permissions, or those of its folder"
        yield Problem(f"{file} cannot be read: {error.strerror}", where, remedy)
    else:
        if file.stat().st_size == 0:
            yield Problem(f"{file} is empty", where, "give a file with one JSON object per line")
        elif file.suffix not in ENDINGS:
            yield Problem(f"{file} is neither .jsonl nor .parquet", where, "convert it, or give it its ending")


# ---- what follows from the flags -------------------------------------------------------------------------------------


def global_batch_size(args: Settings, given: Given) -> int | None:
    """Return samples per rollout / steps; None if there is a remainder or no `--rollout-batch-size`."""
    if args.global_batch_size is not None or args.rollout_batch_size is None:
        return args.global_batch_size
    size, rest = divmod(args.rollout_batch_size * args.n_samples_per_prompt, args.num_steps_per_rollout or 1)
    return None if rest else size


def num_steps_per_rollout(args: Settings, given: Given) -> int | None:
    """Return samples per rollout / `--global-batch-size`; None if there is a remainder, or if one of them is None."""
    if args.num_steps_per_rollout is not None or None in (args.rollout_batch_size, args.global_batch_size):
        return args.num_steps_per_rollout
    steps, rest = divmod(args.rollout_batch_size * args.n_samples_per_prompt, args.global_batch_size)
    return None if rest else steps


def balance_data(args: Settings, given: Given) -> bool:
    """Return True also for `--balance-by-flops`: each rank then gets equally many micro-batches of equal FLOPs."""
    return args.balance_data or args.balance_by_flops


def add_bos_token(args: Settings, given: Given) -> bool:
    """Return False with a chat template: it writes the begin-of-text token itself if the model needs one."""
    return args.add_bos_token and not args.apply_chat_template


RESOLVERS = (global_batch_size, num_steps_per_rollout, balance_data, add_bos_token)

# ---- rules -----------------------------------------------------------------------------------------------------------


def missing_data(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.prompt_data is None and args.rollout_global_dataset and "data_source_path" not in given:
        if args.num_rollout != 0 and args.env is None:
            what = "no prompts are named"
            yield Problem(what, "--prompt-data", "give a jsonl or parquet file (or --data-source-path)")


def missing_batch(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.rollout_batch_size is None and args.num_rollout != 0:
        what = "the size of a rollout is not given"
        yield Problem(what, "--rollout-batch-size", "give the number of prompts per rollout, such as 32")


def length(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.num_rollout is None and args.num_epoch is None:
        what = "the length of the run is not given"
        yield Problem(what, "--num-rollout", "give the number of rollouts (or --num-epoch)")
    if args.num_rollout is not None and args.num_epoch is not None:
        yield Problem("says the same as --num-rollout", "--num-epoch", "give one of the two")
    if args.num_rollout is not None and (args.start_rollout_id or 0) > args.num_rollout:
        yield Problem(f"is beyond --num-rollout {args.num_rollout}", "--start-rollout-id", "raise --num-rollout")
    if args.num_epoch is not None and not args.rollout_global_dataset:
        yield Problem("needs the built-in data set", "--num-epoch", "give --num-rollout")


def batches(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that samples per rollout = global_batch_size * num_steps_per_rollout, and that ranks can share a step."""
    if args.rollout_batch_size is None:
        return
    total = args.rollout_batch_size * args.n_samples_per_prompt
    size, steps = args.global_batch_size, args.num_steps_per_rollout
    if total > BATCH.high:
        what = f"{total} samples per rollout, but at most {BATCH.high} are held at a time"
        yield Problem(what, "--rollout-batch-size x --n-samples-per-prompt", "lower one of the two")
        return
    formula = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {total} samples per rollout"
    if size is None:
        what = f"{formula}, which do not divide into {steps} steps"
        yield Problem(what, "--num-steps-per-rollout", _near(total, steps))
    elif steps is None:
        yield Problem(f"{formula}, which {size} does not divide", "--global-batch-size", _near(total, size))
    elif size * steps != total:
        what = f"{size} x {steps} steps = {size * steps}, but {formula}"
        remedy = "give only one of the two; the other follows"
        yield Problem(what, "--global-batch-size and --num-steps-per-rollout", remedy)
    else:
        yield from _shares(args)


def _shares(args: Settings) -> Iterator[Problem]:
    size, ranks, micro = args.global_batch_size, args.dp_size, args.micro_batch_size
    unit = ranks * micro
    if args.use_dynamic_batch_size and size < ranks:
        what = f"{size} samples per step for {ranks} data-parallel ranks"
        yield Problem(what, "--global-batch-size", f"use at least {ranks}")
    if not args.use_dynamic_batch_size and size % unit:
        what = f"{size} samples do not divide among {ranks} data-parallel ranks x {micro} of a micro-batch"
        if size % ranks:
            total = args.rollout_batch_size * args.n_samples_per_prompt
            yield Problem(what, "--global-batch-size", _near(total, size, unit))
        else:
            remedy = f"{_near(size // ranks, micro)}, or --use-dynamic-batch-size instead"
            yield Problem(what, "--micro-batch-size", remedy)


def _near(total: int, wanted: int, unit: int = 1) -> str:
    """Return the advice to use the divisors of `total` next to `wanted` that are multiples of `unit`."""
    if total % unit:
        return f"make --rollout-batch-size x --n-samples-per-prompt a multiple of {unit}"
    low = [d for d in range(1, math.isqrt(total // unit) + 1) if total // unit % d == 0]
    divisors = [unit * d for d in (*low, *(total // unit // d for d in reversed(low)))]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return f"use {' or '.join(str(d) for d in below + above)}"


def dynamic_batches(args: Settings, given: set[str]) -> Iterator[Problem]:
    chosen = args.device == "auto"  # the plan will choose the size
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None and not chosen:
        yield Problem("needs --max-tokens-per-gpu", "--use-dynamic-batch-size", "give the tokens per micro-batch")
    if args.use_dynamic_batch_size and "micro_batch_size" in given:
        yield Problem("has no effect with --use-dynamic-batch-size", "--micro-batch-size", "give one of the two")
    if args.balance_by_flops and not args.use_dynamic_batch_size and not chosen:
        what = "has no effect without --use-dynamic-batch-size"
        yield Problem(what, "--balance-by-flops", "give both, or --balance-data alone")
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        yield Problem("has no effect without --use-dynamic-batch-size", "--max-tokens-per-gpu", "give both or neither")


def prompt_files(args: Settings, given: set[str]) -> Iterator[Problem]:
    files = split_files(args.prompt_data or "")
    for file in files if args.prompt_data is not None else ():
        yield from data_file(file, "--prompt-data")
    if args.prompt_data_weights is not None and len(args.prompt_data_weights) != len(files):
        what = f"gives {len(args.prompt_data_weights)} numbers for {len(files)} files"
        yield Problem(what, "--prompt-data-weights", "--prompt-data a.jsonl,b.jsonl --prompt-data-weights 3 1")


def mask_type(args: Settings, given: set[str]) -> Iterator[Problem]:
    if "loss_mask_type" in given and args.command == "train":
        what = "has no effect: it is for the conversations that sft and dpo read"
        yield Problem(what, "--loss-mask-type", refused=False)


RULES = (mask_type, missing_data, missing_batch, length, batches, dynamic_batches, prompt_files)
