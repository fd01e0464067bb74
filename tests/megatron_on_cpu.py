"""Megatron-Core as a worker on a CPU has it, for a process from which such workers are forked."""

import importlib

from instep.training.megatron import cpu_platform

cpu_platform.install()
for name in ("megatron.core.optimizer", "instep.training.megatron.backend", "instep.training.megatron.spec"):
    importlib.import_module(name)
