"""Whether bf16 ranks of `hf` have room for a separate model to compute with; also for the plan, without torch."""

from __future__ import annotations

from instep.arguments.settings import Settings

SHARE = 2 / 3  # of a GPU's memory, for weights and all their states in a step; the rest is for activations


def has_room(args: Settings, num_parameters: float, memory: float, world_size: int) -> bool:
    """Return whether masters, gradients, moments and a bf16 copy of so many parameters fill at most two thirds of
    `memory` bytes; one third beside engines that stay on the GPU, or on several ranks.

    There FSDP2 needs much less memory, and hides its communication behind the layers of a large model. On a CPU one
    rank has a copy; several, which share the memory of a host, have none.
    """
    if args.device == "cpu":
        return world_size == 1
    moments = 0 if args.optimizer_cpu_offload else 2 if args.optimizer == "adamw_8bit" else 8
    beside_engines = args.colocate and not args.offload_train
    share = SHARE / 2 if beside_engines or world_size > 1 else SHARE
    return num_parameters * (4 + 4 + moments + 2) <= share * memory
