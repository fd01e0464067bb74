"""The trainer's side of vLLM's weight transfer: rank 0 of the group, which broadcasts tensors in packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

PACK = 1 << 30  # bytes; the tensor that crosses it still belongs to the pack


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How to send: one broadcast per pack, or one per tensor."""

    group: PyNcclCommunicator
    packed: bool = False
    src: int = 0


class NCCLWeightTransferEngine:
    """The two functions that TRL calls."""

    @staticmethod
    def trainer_init(info: dict[str, Any]) -> PyNcclCommunicator:
        """Join the workers as rank 0."""
        group = StatelessProcessGroup.create(info["master_address"], info["master_port"], 0, info["world_size"])
        return PyNcclCommunicator(group, device=0)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: NCCLTrainerSendWeightsArgs
    ) -> None:
        """Broadcast the tensors in order."""
        send, src = trainer_args.group.broadcast, trainer_args.src
        pack: list[torch.Tensor] = []
        for _, tensor in iterator:
            if not trainer_args.packed:
                send(tensor, src)
                continue
            pack.append(tensor.contiguous().view(-1).view(torch.uint8))
            if sum(part.numel() for part in pack) > PACK:
                send(torch.cat(pack), src)
                pack = []
        if pack:
            send(torch.cat(pack), src)
