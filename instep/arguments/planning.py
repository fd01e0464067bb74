"""What the memory plan decides where no flag does: the size of a micro-batch, and whether all stays on the GPUs.

If the GPUs are not known, no size is chosen, and a note says what the plan does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from instep.arguments.args import Draft
from instep.arguments.colocation import OFFLOAD, can_take_turns, wanted
from instep.arguments.concern import Given, Problem, Settings
from instep.engines.backend_choice import planned_kind
from instep.engines.kind import rollout_samples
from instep.errors import ConfigError
from instep.models.sizes import shape_of
from instep.preflight.plan.memory import Gpus, plan_memory

TOKENS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 2048, 1024)  # of a micro-batch; more are not faster
ON_CPU = (1024, 512, 256)
EFFICIENT = 8192  # tokens of a micro-batch that are enough for a step that begins early (`controller/role.py`)
ROOM = 0.9  # the part of a GPU that the plan may fill: estimates are good to about 10 %
# Selected weights count as all weights: the largest case.
_ALL_TRAINED = {"only_train_params_name_list": None, "freeze_params_name_list": None}


def _plans(args: Settings) -> bool:
    """Return whether device and model of the trainer are known. For `instep plan`, --device auto means GPUs."""
    is_known = args.device != "auto" or args.planned
    return is_known and not args.debug_rollout_only and shape_of(args.hf_checkpoint) is not None


def _knows(args: Settings, given: Given | set[str]) -> bool:
    """Return whether the memory is known: the host's, or that of GPUs, measured, given, or assumed by `instep plan`."""
    return args.device == "cpu" or args.planned or "gpu_memory_gb" in given


def _chooses(args: Settings, given: Given) -> bool:
    """Return whether the plan knows enough to choose the size of micro-batches, and whether all stays on the GPUs.

    It does not know the memory of a custom loss, and not well enough that of virtual pipeline stages.
    """
    virtual = args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage
    return _plans(args) and _knows(args, given) and args.loss_type != "custom_loss" and not virtual


def use_dynamic_batch_size(args: Settings, given: Given) -> bool:
    """Return the flag's value; True by default, unless --micro-batch-size counts samples."""
    sizes = {"micro_batch_size", "max_tokens_per_gpu"}
    return args.use_dynamic_batch_size or (sizes.isdisjoint(given) and _chooses(args, given))


def max_tokens_per_gpu(args: Settings, given: Given) -> int | None:
    """Return the given value; by default the most tokens with which trainer and engines fit into the memory.

    If the plan does not know enough, return the smallest size: a longer sample is then its own micro-batch.
    """
    if args.max_tokens_per_gpu is not None or not args.use_dynamic_batch_size or not _plans(args):
        return args.max_tokens_per_gpu
    sizes = ON_CPU if args.device == "cpu" else TOKENS
    if not _chooses(args, given):
        return sizes[-1]
    return next((size for size in sizes if _has_room(args, size)), sizes[-1])


def _has_room(args: Settings, tokens: int) -> bool:
    changed = cast(Draft, args).replace(use_dynamic_batch_size=True, max_tokens_per_gpu=tokens, **_ALL_TRAINED)
    try:
        gpus = plan_memory(changed, shares=False)
    except ConfigError:  # the rule `placement` reports it
        return False
    return all(kind.need("training") <= ROOM * kind.size for kind in gpus if kind.trains)


def unknown(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Report as notes what the plan does not know."""
    if not _plans(args):
        return
    if not _knows(args, given):
        what = "the memory of the GPUs is not known, so no memory is planned"
        yield Problem(what, "--gpu-memory-gb", "give the GiB of the smallest one", refused=False)
    if patterns := args.only_train_params_name_list or args.freeze_params_name_list:
        flag = "--only-train-params-name-list" if args.only_train_params_name_list else "--freeze-params-name-list"
        what = "the plan does not count gradients and moments of the selected weights"
        yield Problem(what, f"{flag} {' '.join(patterns)}", refused=False)


def _all_fits(args: Settings, given: Given) -> bool:
    """Return whether all of trainer and engines, which could take turns, fits on their GPUs at the same time.

    It fits if micro-batches stay efficient, and if the KV cache still holds as many samples of a rollout. Engines must
    wait at their start until the trainer has its memory.
    """
    waits = planned_kind(args).waits_for_room and args.cluster == "local"
    if not (waits and OFFLOAD.isdisjoint(given) and can_take_turns(args) and _chooses(args, given)):
        return False
    in_turns = cast(Draft, args).replace(offload_train=True, offload_rollout=True)
    changed = in_turns.replace(offload_train=False, offload_rollout=False, **_ALL_TRAINED)
    if args.max_tokens_per_gpu is None and use_dynamic_batch_size(args, given):
        size = next((size for size in TOKENS if _has_room(in_turns, size)), TOKENS[-1])
        changed.use_dynamic_batch_size, changed.max_tokens_per_gpu = True, min(size, EFFICIENT)
    try:
        gpus, planned = plan_memory(in_turns), plan_memory(changed, shares=False)
    except ConfigError:  # the rule `placement` reports it
        return False
    held = _requests(gpus) if args.rollout_batch_size is None else min(_requests(gpus), rollout_samples(args))
    return _requests(planned) >= held and all(kind.most <= ROOM * kind.size for kind in planned)


def _requests(gpus: list[Gpus]) -> int:
    """Return the smallest number of requests that the KV cache of an engine holds."""
    return min((engine.requests for kind in gpus for engine in kind.engines), default=0)


def offload_train(args: Settings, given: Given) -> bool:
    """Return what the flags say; by default, whether trainer and engines can and must take turns."""
    return wanted(args, given, "offload_train") and not _all_fits(args, given)


def offload_rollout(args: Settings, given: Given) -> bool:
    """Return what the flags say; by default the same as for the trainer."""
    return wanted(args, given, "offload_rollout") and (args.offload_train or not OFFLOAD.isdisjoint(given))


def beside(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Report as a note that trainer and engines stay on their GPUs, as the plan has found that they fit."""
    if OFFLOAD.isdisjoint(given) and can_take_turns(args) and not args.offload_train and _plans(args):
        what = "trainer and engines fit on their GPUs at the same time and stay there"
        yield Problem(what, "--colocate", "--offload makes them take turns", refused=False)


RESOLVERS = (offload_train, offload_rollout, use_dynamic_batch_size, max_tokens_per_gpu)
RULES = (unknown, beside)
