"""`python -m instep.engines.embedded --model DIR --port N`: checks as much as possible before it loads anything."""

import argparse
import gc
import os
import signal
import socket
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from instep.checkpoints.hf_export import check_hf_checkpoint
from instep.data.tokenizer import end_tokens, load_tokenizer
from instep.system.documents import read_text
from instep.system.importing import first_import
from instep.system.processes import LIFELINE_VARIABLE, follow_parent
from instep_engine import MEMORY_VARIABLE
from instep_engine.guard import Guard


def refuse(message: str) -> NoReturn:
    print(f"embedded engine: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m instep.engines.embedded", allow_abbrev=False, description=__doc__)
    p.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint of a decoder")
    p.add_argument("--served-model-name", nargs="+", help="names of the model in requests; default: the folder")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True, help="0: any free one, printed when ready")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="float16's range is too small")
    p.add_argument("--max-model-len", type=int, help="default: the model's max_position_embeddings")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--batch-invariant", action="store_true", help="results do not depend on the batch; slower")
    p.add_argument("--enable-return-routed-experts", action="store_true", help="answers have each token's experts")
    p.add_argument("--chat-template", type=Path, help="file of a chat template; default: the model's")
    p.add_argument("--trust-remote-code", action="store_true", help="run Python files of the checkpoint")
    args = p.parse_args()
    if args.max_num_seqs < 1 or (args.max_model_len or 1) < 1:
        refuse("--max-model-len and --max-num-seqs must be at least 1")
    try:
        Guard.from_environment()  # the server needs it later
    except ValueError as error:
        refuse(str(error))
    return args


def load_engine(args: argparse.Namespace, pipe: Connection) -> Any:
    check_hf_checkpoint(args.model)
    with first_import("torch"):
        import torch  # only now, because these take seconds
        import transformers

        from instep.engines.embedded.model import Runner, load_model
        from instep.engines.embedded.scheduler import Scheduler
        from instep.engines.embedded.shared import SharedWeights
        from instep.engines.embedded.weights import LiveWeights
        from instep.models.rope import context_length
        from instep_engine.gloo import guard_groups

    guard_groups()
    transformers.utils.logging.disable_progress_bar()
    trust = args.trust_remote_code
    hf_config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
    limit = context_length(hf_config.get_text_config().to_dict(), args.max_model_len)
    if limit is None:
        raise ValueError("config.json does not give the longest sequence: set --max-model-len")
    model = load_model(args.model, getattr(torch, args.dtype), torch.device(args.device), limit, trust)
    tokenizer = load_tokenizer(args.model, trust, args.chat_template and read_text(args.chat_template))
    runner = Runner(model, args.max_num_seqs, limit, args.batch_invariant, args.enable_return_routed_experts)
    eos_ids, others = end_tokens(tokenizer, model.generation_config.eos_token_id)
    if others:
        print(f"embedded engine: token ids {others} do not end a response: they are not special", file=sys.stderr)
    gc.freeze()  # do not scan these objects again and again
    shared, folder = os.environ.get(MEMORY_VARIABLE), Path(args.model)
    weights = SharedWeights(model, folder, Path(shared)) if shared else LiveWeights(model, folder)
    scheduler = Scheduler(runner, weights, tokenizer, pipe)
    pipe.send(dict(calls=set(scheduler.calls()), max_model_len=limit, vocab_size=scheduler.vocab_size, eos_ids=eos_ids))
    return scheduler


def main() -> None:
    """Run the engine in this process and its HTTP server in a child; each ends with the other."""
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # there is nothing to save or to close
    sock, (ours, theirs), (beats, lifeline) = socket.socket(), Pipe(), socket.socketpair()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((args.host, args.port))  # reserved now; it listens once the model is loaded
        if os.fork() == 0:
            ours.close()
            os.environ[LIFELINE_VARIABLE] = str(lifeline.detach())  # the inherited one is the engine's
            follow_parent()
            setproctitle.setthreadtitle("instep-http")
            from instep.engines.embedded.server import serve  # without torch

            serve(sock, theirs, args.served_model_name or [args.model])
        lifeline.close()  # only the child keeps it, so that its end is noticed
        follow_parent(partner=beats, own_pulse=True)
        sock.close()
        theirs.close()
        scheduler = load_engine(args, ours)
    except Exception as error:  # noqa: BLE001 - the end of the process: one line instead of a traceback
        refuse(f"cannot serve --model {args.model} on {args.host}:{args.port}: {type(error).__name__}: {error}")
    scheduler.run()


if __name__ == "__main__":
    main()
