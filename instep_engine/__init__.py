"""Code that runs inside a foreign engine, and code that communicates with it. It imports nothing from `instep`.

    vllm/            the plugin of vLLM
    stream.py, ...   both sides of the wire: the trainer's process and the engine's import the same file

An environment that only runs engines needs this package and xxhash. `pip install --no-deps` of instep installs both
packages and none of the trainer's requirements.
"""

import re

PROTOCOL = 4  # of the weight sync: an engine refuses a trainer with another protocol

# Messages of an engine that trainers look for.
OTHER_MEMORY = "the trainer would write into other memory than this engine's"
MISMATCH = re.compile(r"WeightMismatch\[(.*?)\]: (.*)", re.DOTALL)  # a refused weight: its name, and why
BROKEN = "the stream of weights broke"  # another process' death may be the cause

# Settings from instep for an engine that it starts.
MEMORY_VARIABLE = "INSTEP_MEMORY_FOLDER"  # where it shares its weights with the trainer: a folder of the run
LORA_VARIABLE = "INSTEP_LORA"  # set for engines that accept adapters
DRAFTER_VARIABLE = "INSTEP_DRAFTER"  # set for engines whose drafter is synced: multi-token prediction
FAST_VARIABLE = "INSTEP_FAST_LOG_PROBS"  # set for engines with the sampler of `vllm/fast/`
# 1, or "children": the server's processes end with it, and it outlives its own.
PARENT_VARIABLE = "INSTEP_DIE_WITH_PARENT"
ROOM_VARIABLE = "INSTEP_ROOM"  # SECONDS:FILE; no GPU is used before the file exists
