"""Lets TRL's `VLLMClient` send weights from a CPU. Imported by `trl_train.py` before its trainer is made.

TRL's code asks for a CUDA device in two places before it joins the weight group, although on this machine the group is
that of `stub_vllm`, which speaks gloo: 1.10 reads the UUID of its GPU, which a server refuses if it is one of its own;
1.16 refuses a device that is not `cuda`. Both get an answer here. Nothing else of TRL or torch is changed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from trl.generation.vllm_client import VLLMClient

_init_communicator = VLLMClient.init_communicator


def _as_cuda(self: VLLMClient, device: Any = 0) -> None:
    """Join the weight group as if from the current CUDA device; one without an index is never selected."""
    _init_communicator(self, device=torch.device("cuda"))


torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid="a-trainer-without-a-gpu")
VLLMClient.init_communicator = _as_cuda
