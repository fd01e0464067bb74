"""`instep atropos-serve`: the command line of Atropos' `example_trainer/vllm_api_server.py`, on stock vLLM.

The process becomes `vllm serve` with instep's plugin, so users can end it as usual. Generation is open to every process
of this host. Control routes need a key, which the trainer of the same user finds in a file (`key_file`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.arguments.args import Args
from instep.engines import keys
from instep.errors import ConfigError
from instep.system.options import OptionParser
from instep.system.ports import LOOPBACK, port_is_free
from instep_engine import PARENT_VARIABLE
from instep_engine.guard import EVERYONE, GENERATE_VARIABLE, HOSTS_VARIABLE, KEY_VARIABLE
from instep_neighbours.atropos.trainer_flags import dashed

DEFAULT_PORT = 9001
WHERE = "instep atropos-serve"
HELP = """\
usage: instep atropos-serve --model MODEL [--port 9001] [--tensor-parallel-size N] [--pipeline-parallel-size N]
           [--dtype bfloat16|float32] [--gpu-memory-utilization X] [--enable-lora --max-lora-rank N] [--host ADDRESS]
           [any other flag of `vllm serve` that instep passes on]

The server of Atropos' example trainer (vllm_api_server.py). VLLM_ENABLE_SHARED_WEIGHTS=1 in its environment shares the
weights with `instep atropos-train --weight-bridge-mode shared_vllm`, by vllm_bridge_config.json in $LOGDIR or the
current folder. See docs/neighbours/atropos_trainer.md."""

_NO_TLS = "the server speaks plain HTTP on loopback", "put a proxy before it that ends TLS (INSTEP_ALLOWED_HOSTS)"
REFUSED = {  # flags of that server -> why not, and what instead
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--enable-ssl-refresh"), _NO_TLS),
    "--ssl-cert-reqs": _NO_TLS,
    "--root-path": ("the routes are at the root, where environments and the trainer expect them", "remove it"),
    "--served-model-name": ("trainer and environments use the name of --model", "use the name of --model"),
    "--data-parallel-size": ("a trainer attaches to one engine", "--tensor-parallel-size"),
}
FOUND_BY = ("-X", "vllm_api_server")  # Python ignores it; the guide ends servers by `pkill -f vllm_api_server`
_LONG = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_LONG |= {"--log-level": "--uvicorn-log-level"}  # by another name in `vllm serve`
_SWITCHES = frozenset({"--enable-lora", "--enable-sleep-mode"})
_OURS = _SWITCHES | frozenset(
    "--model --host --port --dtype --tensor-parallel-size --pipeline-parallel-size --max-lora-rank "
    "--gpu-memory-utilization --seed".split()
)


def key_file(port: int) -> Path:
    """Return the file with the key of this user's server at `port` of this host (mode 600)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "instep" / "servers" / f"{socket.gethostname()}-{port}.key"


def main(words: Sequence[str]) -> int:
    """Become the server. Return only after `--help`.

    Raises:
        ConfigError: a flag is unknown or refused, the port is taken, or vLLM is not installed.
    """
    if "-h" in words or "--help" in words:
        print(HELP)
        return 0
    given, rest = _split(words)
    host, port = given.get("--host", LOOPBACK), _whole(given, "--port", "port", DEFAULT_PORT)
    if not port_is_free(port):
        raise ConfigError(f"port {port} is taken", where=f"{WHERE} --port", remedy="name a free one, or end its server")
    argv, env = command(given, rest, host, port)
    key = os.environ.get(KEY_VARIABLE, "").strip() or secrets.token_hex(32)
    keys.write(key_file(port).parent, key, key_file(port).name)
    env |= {"PYTHONUNBUFFERED": "1"}  # like the guide's `python -u`, which an exec drops
    env |= {KEY_VARIABLE: key, GENERATE_VARIABLE: EVERYONE, HOSTS_VARIABLE: os.environ.get(HOSTS_VARIABLE, "")}
    print(f"[vLLM Server] generation is open to this host; control routes ask for the key in {key_file(port)}")
    print(f"[vLLM Server] {' '.join(argv[2:])}", flush=True)
    os.execve(sys.executable, [sys.executable, *FOUND_BY, *argv], {**os.environ, **env})


def _whole(given: dict[str, Any], flag: str, what: str, default: int = 1) -> int:
    text = given.get(flag, str(default))
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ConfigError(
            f"{text!r} is not a {what}", where=f"{WHERE} {flag}", remedy=f"give an integer, such as {default}"
        )
    return int(text)


def _split(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of flags that are read here, and the words for vLLM. Raises ConfigError."""
    parser = OptionParser(WHERE, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in _OURS - _SWITCHES:
        parser.add_argument(name, dest=name, required=name == "--model")
    for name in _SWITCHES:
        parser.add_argument(name, dest=name, action="store_true")
    parts = (dashed(word).partition("=") for word in words)
    given, rest = parser.parse_known_args([_LONG.get(name, name) + equals + value for name, equals, value in parts])
    for name in (word.partition("=")[0] for word in rest):
        if name in REFUSED:
            why, instead = REFUSED[name]
            raise ConfigError(f"is refused: {why}", where=f"{WHERE} {name}", remedy=instead)
    return vars(given), rest


def shares_weights() -> bool:
    """Return whether the environment variables request shared weights, as in Atropos' server."""
    nodes = os.environ.get("NUM_INFERENCE_NODES", "-1")
    return os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0") == "1" or (nodes.isdigit() and int(nodes) >= 0)


def command(given: dict[str, Any], rest: Sequence[str], host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of the server, and environment variables. Raises ConfigError, as `main`."""
    from instep.cluster.engine_plan import plan_engines
    from instep.controller.device import resolve_on_machine
    from instep.engines.kind import kind_of
    from instep.engines.spec import Addresses

    args = server_args(given, rest)
    kind = kind_of("vllm")
    kind.check_installed(WHERE)
    args = resolve_on_machine(args, with_engines=True)
    spec, at = plan_engines(args)[0], Addresses(host, port, host)
    kind.check_start(args, spec)
    env = kind.environment(args, spec, at, LOOPBACK, args.num_threads or 1)
    env |= {PARENT_VARIABLE: "children", "INSTEP_ATROPOS_URL": f"http://{host}:{port}"}
    if "--enable-lora" in given:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    words = kind.command(args, spec, at)[2:]
    if "--enable-sleep-mode" in given:
        if args.weight_sync == "single-copy":
            what = "a server that shares its weights cannot sleep: the trainer computes with them"
            raise ConfigError(what, where=f"{WHERE} --enable-sleep-mode", remedy="remove one of the two")
        words.append("--enable-sleep-mode")
    return ["-m", "vllm.entrypoints.cli.main", *words], env


def server_args(given: dict[str, Any], rest: Sequence[str]) -> Args:
    """Return the arguments of a run whose engine is this server. Raises ConfigError for unsupported values."""
    from instep.arguments.parse import parse
    from instep.controller.device import device_here

    tensor, pipeline = (_whole(given, f"--{n}-parallel-size", "number of GPUs") for n in ("tensor", "pipeline"))
    size, device, shared = str(tensor * pipeline), device_here(), shares_weights() and "--enable-lora" not in given
    if shared and pipeline > 1:
        raise ConfigError(
            "pipeline stages cannot share their weights with a trainer",
            where=f"{WHERE} --pipeline-parallel-size {pipeline} with VLLM_ENABLE_SHARED_WEIGHTS=1",
            remedy=f"`--tensor-parallel-size {tensor * pipeline}`, or `--enable-lora` (mode lora_only)",
        )
    same = "--rollout-backend vllm --train-backend hf --disable-rollout-global-dataset --rm-type random --no-api-key "
    same += "--num-rollout 1 --rollout-batch-size 1 --rollout-max-response-len 1"
    words = ["--hf-checkpoint", given["--model"], *same.split(), "--device", device, "--seed", given.get("--seed", "0")]
    words += ["--rollout-num-gpus-per-engine", size, "--vllm-pipeline-parallel-size", str(pipeline)]
    dtype = {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(d := given.get("--dtype", "auto"), d)
    words += ["--vllm-dtype", dtype, "--precision", "fp32" if dtype == "float32" else "bf16"]
    if shared and device == "cuda":  # the trainer's ranks need the rest of the same GPUs' memory
        words += ["--colocate", "--actor-num-gpus-per-node", size, "--no-offload-train", "--no-offload-rollout"]
    else:
        words += ["--rollout-num-gpus", size, "--actor-num-gpus-per-node", "1"]
    if "--enable-lora" in given:
        words += ["--weight-sync", "lora", "--lora-rank", given.get("--max-lora-rank") or "16"]
    else:
        words += ["--weight-sync", "single-copy" if shared else "restart"]  # nothing is synced: any way works
    if share := given.get("--gpu-memory-utilization"):
        words += ["--vllm-gpu-memory-utilization", share]
    words += ["--vllm-middleware", "instep_engine.vllm.atropos.Middleware"]
    return parse([*words, *(f"--vllm-{word[2:]}" if word.startswith("--") else word for word in rest)], "train")
