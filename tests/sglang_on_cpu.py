"""SGLang as an engine on a CPU has it, for a process from which its servers are forked."""

import importlib
import os

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}  # read at the import
from instep_engine.sglang.stand_ins import prepare  # noqa: E402

prepare()
MODULES = (
    "sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler sglang.srt.models.qwen3 "
    "sglang.srt.managers.detokenizer_manager instep_engine.sglang.server instep_engine.sglang.weights"
)
for name in MODULES.split():
    importlib.import_module(name)
