"""`python -m instep.engines.embedded --model DIR --port N`: what can be refused is refused before anything loads."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m instep.engines.embedded", allow_abbrev=False, description=__doc__)
    p.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint of a decoder")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True, help="0: any free one, printed when ready")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--max-model-len", type=int, help="default: the model's max_position_embeddings")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--num-threads", type=int, help="default: torch's")
    p.add_argument("--request-timeout", type=float, default=1800.0, help="seconds, for every request")
    p.add_argument("--run-token", help="acts on nothing: marks this process for whoever looks for orphans")
    args = p.parse_args(argv)
    for name in ("max_model_len", "max_num_seqs", "num_threads", "request_timeout"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            p.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    return args


def refuse(message: str) -> NoReturn:
    print(f"embedded engine: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)


def die_with_parent() -> None:
    """SIGKILL when the parent dies (Linux), and when the pipe INSTEP_LIFELINE_FD closes."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    lifeline = os.environ.get("INSTEP_LIFELINE_FD")
    if lifeline is not None:

        def watch(fd: int) -> None:
            while os.read(fd, 1):
                pass
            os._exit(1)

        threading.Thread(target=watch, args=(int(lifeline),), daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """Reserve the port now; listening begins when the model is loaded."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        refuse(f"cannot bind {host}:{port}: {error}; choose another --port")
    return sock


def check_checkpoint(path: Path) -> dict[str, Any]:
    """config.json of a decoder, or a refusal."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        refuse(f"--model {path} is no checkpoint: {error}")
    kinds = config.get("architectures") or [str(config.get("model_type"))]
    if config.get("is_encoder_decoder") or not kinds[0].endswith(("ForCausalLM", "LMHeadModel")):
        refuse(f"--model {path} is a {kinds[0]}, not a decoder: a causal language model (…ForCausalLM) is needed")
    if not any(path.glob("*.safetensors")):
        refuse(f"--model {path} is no checkpoint: it holds no *.safetensors")
    return config


def eos_ids(path: Path, config: dict[str, Any]) -> frozenset[int]:
    file = path / "generation_config.json"
    generation = json.loads(file.read_text()) if file.exists() else {}
    found: set[int] = set()
    for ids in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def load(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The server around the loaded model. Imports torch and transformers only here."""
    import torch
    from transformers import AutoTokenizer

    from instep.engines.embedded.model import Runner, load_model
    from instep.engines.embedded.scheduler import Engine
    from instep.engines.embedded.server import Server
    from instep.engines.embedded.weights import LiveWeights

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    path = Path(args.model)
    limit = args.max_model_len or config["max_position_embeddings"]
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    model = load_model(args.model, getattr(torch, args.dtype), device, limit)
    named = any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = AutoTokenizer.from_pretrained(args.model) if named else None
    engine = Engine(Runner(model, args.max_num_seqs, limit), LiveWeights(model), tokenizer, args.max_num_seqs)
    return Server(engine, args.model, limit, eos_ids(path, config), args.request_timeout)


async def serve(server: Any, sock: socket.socket) -> None:
    from aiohttp import web

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, os._exit, 0)  # nothing here outlives the process
    server.engine.start(loop)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=4096).start()
    host, port = sock.getsockname()[:2]
    print(f"embedded engine: ready at http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    die_with_parent()
    sock = bind(args.host, args.port)
    config = check_checkpoint(Path(args.model))
    if args.num_threads:
        os.environ["OMP_NUM_THREADS"] = str(args.num_threads)
    try:
        server = load(args, config)
    except Exception as error:  # the process border: one line instead of a traceback
        refuse(f"cannot load --model {args.model}: {type(error).__name__}: {error}")
    sys.setswitchinterval(0.001)  # parsing HTTP must not hold up the model's thread for long
    try:
        asyncio.run(serve(server, sock))
    except OSError as error:
        refuse(f"cannot listen on {args.host}:{args.port}: {error}; choose another --port")


if __name__ == "__main__":
    main()
