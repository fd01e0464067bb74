"""vLLM's communicator of raw tensors, over gloo instead of NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed.utils import WAIT, StatelessProcessGroup


class PyNcclCommunicator:
    """The ranks of `group`; as NCCL's, it begins with rank 0's id and an all-reduce of one fp32 zero."""

    def __init__(self, group: StatelessProcessGroup, device: Any):
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        group.broadcast_obj(b"gloo", src=0)
        store = dist.PrefixStore("instep-gloo", group.store)
        self.gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, WAIT)
        self.gloo.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """The bytes of `tensor` of rank `src`, which on the other ranks replace theirs."""
        whole = tensor.contiguous()
        self.gloo.broadcast(whole.view(-1).view(torch.uint8), src).wait()
        if whole is not tensor:
            tensor.copy_(whole)
