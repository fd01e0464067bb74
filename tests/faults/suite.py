"""All faults and scenarios. `docs/faults.md` is made from them (see `document.py`)."""

from tests.faults import process_faults  # noqa: I001 - the order of the document
from tests.faults import phase_faults
from tests.faults import vllm_faults
from tests.faults import sglang_faults
from tests.faults import data_faults
from tests.faults import damage_faults
from tests.faults import input_faults
from tests.faults import request_faults
from tests.faults import sync_faults
from tests.faults import ray_faults
from tests.faults.registry import FAULTS, SCENARIOS, SGLANG, SLOW, VLLM

__all__ = [
    "FAULTS",
    "SCENARIOS",
    "SGLANG",
    "SLOW",
    "VLLM",
    "damage_faults",
    "data_faults",
    "input_faults",
    "phase_faults",
    "process_faults",
    "ray_faults",
    "request_faults",
    "sglang_faults",
    "sync_faults",
    "vllm_faults",
]
