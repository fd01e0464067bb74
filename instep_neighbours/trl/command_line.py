"""The command line of `trl vllm-serve`, read as flags of `instep serve`. This file needs no torch."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from instep.arguments.all_flags import find
from instep.arguments.engine_flags import find_engine_flag
from instep.arguments.parser import is_flag
from instep.engines.flags import PREFIXES
from instep.errors import ConfigError
from instep.system.ports import LOOPBACK

LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
DTYPES = {  # flags of `instep serve`
    **dict.fromkeys(("float32", "float"), ["--precision", "fp32"]),
    **dict.fromkeys(("float16", "half"), ["--vllm-dtype", "float16"]),
    "bfloat16": ["--precision", "bf16"],
}
COMMAND = "instep vllm-serve"

HELP = """\
usage: instep vllm-serve [MODEL | --model MODEL] [--flag value ...]

The server that TRL's own clients use, unmodified: of `trl vllm-serve` up to TRL 1.10 and of `vllm serve` from 1.11 on
(docs/neighbours/trl.md). Engines are started behind one port, and weights that a trainer sends reach all of them.

Flags of `trl vllm-serve`, each with - or _ between its words:
  --model MODEL, --revision REVISION   the checkpoint: a folder, or ORG/NAME of the hub
  --tensor_parallel_size N             GPUs (on a CPU processes) of each engine (default 1)
  --data_parallel_size N               engines (default 1)
  --host HOST                          where it listens (default 127.0.0.1; any other asks for a key, or for
                                       --no-api-key)
  --port PORT                          (default 8000)
  --gpu_memory_utilization FRACTION    vLLM's own
  --dtype auto|bfloat16|float16|float32  what weights and engines compute in (auto: bfloat16 on GPUs, float32 on a CPU;
                                       float16: with vLLM alone)
  --max_model_len TOKENS               the longest prompt and completion
  --enable_prefix_caching [BOOL]       vLLM's own
  --enforce_eager [BOOL]               vLLM's own
  --kv_cache_dtype DTYPE               vLLM's own
  --trust_remote_code [BOOL]           vLLM's own
  --vllm_model_impl vllm|transformers  vLLM's own
  --distributed_executor_backend NAME  vLLM's own; not ray
  --speculative_config JSON            vLLM's own
  --log_level LEVEL                    of requests (logs/front.log) and of vLLM's server (default info)
  --sync-timeout SECONDS               for bringing one version to the engines, with the requests that it waits for
                                       (default 600)
Refused: --config (write its fields as flags).

Flags of the `vllm serve` that TRL >= 1.11 tells its users to start:
  --weight-transfer-config '{"backend": "nccl"}'  what is done anyway (on a CPU by gloo); no other one
  --logprobs-mode processed_logprobs   what is done anyway; no other one
  --max-logprobs N                     vLLM's own (default -1: no limit)
  and its others, with or without --vllm- before their name; one that `instep serve` has, too, means what it means there

All flags of `instep serve` act, too (`instep serve --help`), above all --rollout-backend vllm|embedded, --device,
--run-dir, --api-key-file, --no-api-key and --allowed-hosts.

Example
  instep vllm-serve --model Qwen/Qwen2.5-7B --tensor-parallel-size 2 --data-parallel-size 2"""


@dataclass
class Serving:
    """What a command line asks for: words for `instep serve`, and what that has no flag for."""

    words: list[str] = field(default_factory=list)
    host: str = LOOPBACK
    log_level: str = "info"
    sync_timeout: float = 600.0

    @property
    def on_loopback(self) -> bool:
        return self.host == "localhost" or _loopback(self.host)


def read(argv: Sequence[str]) -> Serving:
    """Translate a command line. Raises ConfigError for everything that is wrong with TRL's own flags."""
    positional = list(argv[:1]) if argv and not is_flag(argv[0]) else []
    given, rest = _split(argv[len(positional) :])
    out, problems = Serving(list(rest)), []
    if positional and "model" in given:
        problems.append(f"--model: the model is named already: {positional[0]}")
    elif positional:
        given["model"] = positional
    named = {"model": "None", "revision": "None"}
    sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    for name, values in given.items():
        try:
            if name in sizes:
                sizes[name] = _count(_one(values))
            elif name in named:
                named[name] = _one(values)
            else:
                _FLAGS[name](out, values)
        except ValueError as error:
            problems.append(f"--{name}: {error}")
    if named["model"] != "None":
        out.words += ["--hf-checkpoint", "@".join(word for word in named.values() if word != "None")]
    if given.keys() & sizes.keys():
        tensor, data = sizes.values()
        out.words += ["--rollout-num-gpus", str(tensor * data), "--rollout-num-gpus-per-engine", str(tensor)]
    open_or_keyed = any(w.partition("=")[0] in ("--no-api-key", "--api-key-file") for w in rest)
    if not out.on_loopback and not open_or_keyed:
        problems.append(
            f"--host {out.host}: other hosts could send weights and ask for texts: give --api-key-file FILE (clients "
            "then name the server http://user:KEY@HOST:PORT), or --no-api-key on a network that you trust"
        )
    if problems:
        remedy = f"mend {'it' if len(problems) == 1 else 'all of them'}; `{COMMAND} --help` explains the flags"
        raise ConfigError("; ".join(problems), where=COMMAND, remedy=remedy)
    return out


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of TRL's flags by name, and the other words."""
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    values = rest
    for word in argv:
        name, equals, value = word.partition("=")
        if not is_flag(word):
            values.append(word)
        elif (known := name[2:].replace("-", "_")) in _FLAGS:
            values = given[known] = [value] if equals else []
        else:
            values = rest
            rest.append(_of_serve(name) + equals + value)
    return given, rest


def _of_serve(name: str) -> str:
    """The flag of `instep serve` that is meant: one of vLLM's may come without its prefix."""
    ours, prefixed = find(name), PREFIXES["vllm"] + name[2:].replace("_", "-")
    is_theirs = name.startswith("--") and (ours is None or ours.status in ("refused", "later"))
    return prefixed if is_theirs and find_engine_flag(prefixed) else name


def _one(values: list[str]) -> str:
    if len(values) != 1 or not values[0].strip():
        raise ValueError(f"needs one value, got {len(values)}")
    return values[0]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is no whole number above 0")
    return int(text)


def _truth(values: list[str]) -> bool | None:
    """A boolean as transformers' HfArgumentParser reads it; None for "None"."""
    text = values[0].lower() if values else "true"
    if len(values) > 1 or text not in ("true", "t", "yes", "y", "1", "false", "f", "no", "n", "0", "none"):
        raise ValueError(f"{' '.join(values)!r} is neither true nor false")
    return None if text == "none" else text in ("true", "t", "yes", "y", "1")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Read = Callable[[Serving, list[str]], None]


def _as(flag: str, unless: str = "") -> Read:
    """Read as `flag` of `instep serve`; the value `unless`, and none at all, changes nothing."""

    def read(out: Serving, values: list[str]) -> None:
        if (value := _one(values)) not in (unless, "None"):
            out.words += [flag, value]

    return read


def _switch(on: str, off: str = "") -> Read:
    def read(out: Serving, values: list[str]) -> None:
        truth = _truth(values)
        word = on if truth else off if truth is False else ""
        out.words += [word] if word else []

    return read


def _refused(why: str) -> Read:
    def read(out: Serving, values: list[str]) -> None:
        if values != ["None"]:
            raise ValueError(why)

    return read


def _only(value: object, why: str) -> Read:
    """Read what is so anyway, as JSON or a word; another value is refused."""

    def read(out: Serving, values: list[str]) -> None:
        try:
            given = json.loads(_one(values)) if isinstance(value, dict) else _one(values)
        except json.JSONDecodeError as error:
            raise ValueError(f"is no JSON: {error}") from error
        if given != value:
            raise ValueError(f"{why}; leave it out")

    return read


def _host(out: Serving, values: list[str]) -> None:
    out.host = _one(values)


def _log_level(out: Serving, values: list[str]) -> None:
    out.log_level = _one(values)
    if out.log_level not in LEVELS:
        raise ValueError(f"{out.log_level!r} is none of {', '.join(LEVELS)}")


def _sync_timeout(out: Serving, values: list[str]) -> None:
    try:
        out.sync_timeout = float(_one(values))
    except ValueError as error:
        raise ValueError("needs a number of seconds") from error
    if not 0 < out.sync_timeout <= 1e6:
        raise ValueError("must be above 0 and at most 1e6 seconds")


def _dtype(out: Serving, values: list[str]) -> None:
    value = _one(values)
    if value != "auto":
        if value not in DTYPES:
            raise ValueError(f"{value!r} is not served; auto, {', '.join(DTYPES)} are")
        out.words += DTYPES[value]


def _executor(out: Serving, values: list[str]) -> None:
    if (value := _one(values)) == "ray":
        raise ValueError("all engines of this server are on one host; leave it out")
    _as("--vllm-distributed-executor-backend")(out, [value])


def _speculation(out: Serving, values: list[str]) -> None:
    try:
        json.loads(_one(values))
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from error
    out.words += ["--vllm-speculative-config", values[0]]


_FLAGS: dict[str, Read] = {
    "model": _as(""),
    "revision": _as(""),
    "config": _refused("write the fields of that file as flags"),
    "tensor_parallel_size": _as(""),
    "data_parallel_size": _as(""),
    "host": _host,
    "port": _as("--port"),
    "gpu_memory_utilization": _as("--vllm-gpu-memory-utilization"),
    "dtype": _dtype,
    "max_model_len": _as("--vllm-max-model-len"),
    "enable_prefix_caching": _switch("--vllm-enable-prefix-caching", "--vllm-no-enable-prefix-caching"),
    "enforce_eager": _switch("--vllm-enforce-eager"),
    "kv_cache_dtype": _as("--vllm-kv-cache-dtype", "auto"),
    "trust_remote_code": _switch("--vllm-trust-remote-code"),
    "vllm_model_impl": _as("--vllm-model-impl", "vllm"),
    "distributed_executor_backend": _executor,
    "speculative_config": _speculation,
    "weight_transfer_config": _only({"backend": "nccl"}, "weights come by the group that TRL's trainers make"),
    "logprobs_mode": _only("processed_logprobs", "log-probs are of the distribution that was sampled from"),
    "max_logprobs": _as("--vllm-max-logprobs", "-1"),
    "log_level": _log_level,
    "sync_timeout": _sync_timeout,
}
