"""How a trainer sends tensors from vLLM 0.28 on: in packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
) -> None:
    """Broadcast the tensors in order; a pack ends with the one that makes it longer than the limit."""
    tensors = ((item[0], post_iter_func(item)) for item in iterator)
    NCCLWeightTransferEngine.trainer_send_weights(tensors, NCCLTrainerSendWeightsArgs(group, packed=True, src=src))
