"""Megatron-Core as a worker on a CPU has it, for a process from which such workers are forked."""

import importlib

from instep.training.megatron import cpu_platform

cpu_platform.install()
MODULES = (
    "megatron.core.optimizer instep.training.megatron.backend instep.training.megatron.spec "
    "transformers.models.qwen3.modeling_qwen3 pytest"  # two seconds of each rank of tests/distributed
)
for name in MODULES.split():
    importlib.import_module(name)
