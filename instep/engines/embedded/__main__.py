"""`python -m instep.engines.embedded --model DIR --port N`: what can be refused is refused before anything loads."""

import argparse
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from instep.processes import follow_parent


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m instep.engines.embedded", allow_abbrev=False, description=__doc__)
    p.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint of a decoder")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True, help="0: any free one, printed when ready")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    p.add_argument("--max-model-len", type=int, help="default: the model's max_position_embeddings")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--num-threads", type=int, help="default: torch's")
    args = p.parse_args()
    if args.dtype not in ("float32", "bfloat16"):
        refuse(f"--dtype {args.dtype} is not supported: its range is too small; use float32 or bfloat16")
    if min(x for x in (args.max_model_len, args.max_num_seqs, args.num_threads, 1) if x is not None) < 1:
        refuse("--max-model-len, --max-num-seqs and --num-threads must be at least 1")
    return args


def refuse(message: str) -> NoReturn:
    print(f"embedded engine: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)


def check_checkpoint(path: Path) -> tuple[dict[str, Any], frozenset[int]]:
    """config.json of a decoder and all its EOS ids, or a refusal."""
    try:
        config = json.loads((path / "config.json").read_text())
        file = path / "generation_config.json"
        generation = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        refuse(f"--model {path} is no checkpoint: {error}")
    kind = (config.get("architectures") or [str(config.get("model_type"))])[0]
    if config.get("is_encoder_decoder") or not kind.endswith(("ForCausalLM", "LMHeadModel")):
        refuse(f"--model {path} is a {kind}, not a decoder: a causal language model is needed")
    if not any(path.glob("*.safetensors")):
        refuse(f"--model {path} is no checkpoint: it holds no *.safetensors")
    found = [generation.get("eos_token_id"), config.get("eos_token_id")]
    return config, frozenset(x for ids in found if ids is not None for x in (ids if isinstance(ids, list) else [ids]))


def serve(args: argparse.Namespace, sock: socket.socket) -> None:
    """Load the model, then serve it until the process ends."""
    config, eos_ids = check_checkpoint(Path(args.model))
    import torch  # only now: these take seconds
    import transformers
    from aiohttp import web

    from instep.engines.embedded.model import Runner, load_model
    from instep.engines.embedded.scheduler import Engine
    from instep.engines.embedded.server import Server
    from instep.engines.embedded.weights import LiveWeights

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    limit = args.max_model_len or config["max_position_embeddings"]
    model = load_model(args.model, getattr(torch, args.dtype), torch.device(args.device), limit)
    named = any((Path(args.model) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model) if named else None
    engine = Engine(Runner(model, args.max_num_seqs, limit), LiveWeights(model), tokenizer, args.max_num_seqs)
    app = Server(engine, args.model, limit, eos_ids).app()
    ready = "embedded engine: ready at http://{}:{}".format(*sock.getsockname())
    how: dict[str, Any] = dict(backlog=4096, access_log=None, handle_signals=False, handler_cancellation=True)
    web.run_app(app, sock=sock, print=lambda _: print(ready, flush=True), **how)


def main() -> None:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # nothing here outlives the process
    follow_parent()
    sys.setswitchinterval(0.001)  # parsing HTTP must not hold up the model's thread for long
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((args.host, args.port))  # reserved now; listening begins when the model is loaded
        serve(args, sock)
    except Exception as error:  # the process border: one line instead of a traceback
        refuse(f"cannot serve --model {args.model} on {args.host}:{args.port}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
