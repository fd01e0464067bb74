"""SGLang's server arguments, in slime `--sglang-*`."""

from instep.arguments.flag import read_flags

NOTE = "the engine is vLLM, not SGLang"
SGLANG = read_flags(__file__, note=NOTE)
