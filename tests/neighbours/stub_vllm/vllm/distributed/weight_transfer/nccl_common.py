"""How a trainer joins the group from vLLM 0.28 on, as rank 0."""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


def trainer_init(info: dict[str, Any]) -> PyNcclCommunicator:
    """Join the workers as rank 0."""
    return NCCLWeightTransferEngine.trainer_init(info)
