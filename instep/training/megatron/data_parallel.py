"""The chunks of a model under Megatron's data parallelism, and their optimizer.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from instep.training.megatron.experts import GroupedExperts


def share_gradients(
    chunks: Sequence[Any], config: Any, ddp_config: Any, optimizer_config: Any, finish: Callable[[], None]
) -> tuple[list[Any], Any]:
    """Return the chunks with their gradients summed over data-parallel ranks, and the optimizer.

    Args:
        config: of the model; it gets the functions that end a backward pass.
        finish: called when all gradients are summed.
    """
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
        for module in chunk.modules() if not ddp_config.overlap_grad_reduce else ():  # it waits for each gradient
            if isinstance(module, GroupedExperts):
                module.train_together()

    def finalize(model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
        finalize_model_grads(model, None, **kwargs)  # Megatron would divide by tokens; loss weights contain it
        finish()

    config.finalize_model_grads_func = finalize
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped, get_megatron_optimizer(optimizer_config, wrapped, use_gloo_process_groups=False)
