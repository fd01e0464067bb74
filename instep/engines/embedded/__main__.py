"""`python -m instep.engines.embedded --model DIR --port N`: what can be refused is refused before anything loads."""

import argparse
import gc
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from instep.checkpoints.hf_export import check_hf_checkpoint
from instep.processes import follow_parent


def refuse(message: str) -> NoReturn:
    print(f"embedded engine: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m instep.engines.embedded", allow_abbrev=False, description=__doc__)
    p.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint of a decoder")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True, help="0: any free one, printed when ready")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="float16's range is too small")
    p.add_argument("--max-model-len", type=int, help="default: the model's max_position_embeddings")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--batch-invariant", action="store_true", help="bits do not depend on what shares the batch; slower")
    args = p.parse_args()
    if args.max_num_seqs < 1 or (args.max_model_len or 1) < 1:
        refuse("--max-model-len and --max-num-seqs must be at least 1")
    return args


def serve(args: argparse.Namespace, sock: socket.socket) -> None:
    """Load the model, then serve it until the process ends."""
    config = check_hf_checkpoint(args.model)
    import torch  # only now: these take seconds
    import transformers
    from aiohttp import web

    from instep.engines.embedded.model import Runner, load_model
    from instep.engines.embedded.scheduler import Engine
    from instep.engines.embedded.server import Server
    from instep.engines.embedded.weights import LiveWeights

    transformers.utils.logging.disable_progress_bar()
    limit = args.max_model_len or config["max_position_embeddings"]
    model = load_model(args.model, getattr(torch, args.dtype), torch.device(args.device), limit)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    runner = Runner(model, args.max_num_seqs, limit, args.batch_invariant)
    found = [model.generation_config.eos_token_id, model.config.eos_token_id]
    eos_ids = frozenset(x for ids in found if ids is not None for x in (ids if isinstance(ids, list) else [ids]))
    gc.freeze()  # what stays is not looked through again and again
    app = Server(Engine(runner, LiveWeights(model), tokenizer), args.model, eos_ids).app()
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
