"""How long does a weight sync take, by each way, between an hf trainer and vLLM on one CPU?

    python benchmarks/weight_sync.py [--num-syncs 5] [--precision fp32 bf16] [--out FILE]

A model of 0.47 B random weights; before each sync the trainer loads another checkpoint, so that every weight changes.
`transfer` is what an engine is paused for, from the pause to the end of the resume; `proof` is the two forward passes
of the probe on either side. The ways take turns in one run, each with an engine of its own, which nothing else asks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import weight_sync_gpu  # noqa: E402
from benchmarks.machine import cores  # noqa: E402
from instep.arguments.parse import parse  # noqa: E402
from instep.cluster.engine_plan import plan_engines  # noqa: E402
from instep.cluster.engine_start import start_engine  # noqa: E402
from instep.cluster.local import WorkerGroup  # noqa: E402
from instep.controller.role import RoleTrainer  # noqa: E402
from instep.controller.sync.session import Session  # noqa: E402
from instep.controller.sync.weight_sync import WeightSync  # noqa: E402
from instep.observability.versions import versions  # noqa: E402
from instep.system.processes import num_usable_cpus  # noqa: E402
from instep.system.scratch import Scratch, memory_root  # noqa: E402
from instep.training import lr_schedule  # noqa: E402
from instep.weights.way import SINGLE_COPY  # noqa: E402
from instep_engine import MEMORY_VARIABLE  # noqa: E402
from instep_engine.place import SYNC  # noqa: E402

WAYS = ("shm", "single-copy")
MODEL = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
MODEL |= dict(num_key_value_heads=8, head_dim=128, vocab_size=32000, tie_word_embeddings=True)
FLAGS = "--input-key prompt --rm-type random --train-backend hf --rollout-backend vllm --device cpu --num-rollout 1 "
FLAGS += "--actor-num-gpus-per-node 1 --rollout-batch-size 1 --n-samples-per-prompt 8 --vllm-max-model-len 256"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: see weight_sync_gpu.py")
    if "--device" in sys.argv and "cuda" in sys.argv:
        sys.exit(weight_sync_gpu.main())
    parser.add_argument("--num-syncs", type=int, default=5, help="of each way; one more before them does not count")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "weight-sync-cpu.json")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here (make install-vllm)")
        return
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        result = measure(options, Path(scratch))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(f"{row['precision']} {row['way']:12} transfer {row['transfer_s']:.3f} s, proof {row['proof_s']:.3f} s")
    print(json.dumps(result["headline"]))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    checkpoints = [checkpoint(scratch / f"hf-{seed}", seed) for seed in range(2)]
    (scratch / "train.jsonl").write_text('{"prompt": "1"}\n')
    rows = [
        measure_way(options, scratch / precision / way, checkpoints, precision, way)
        for precision in options.precision
        for way in WAYS
    ]
    found = {(row["precision"], row["way"]): row for row in rows}
    headline = {
        f"{precision}_shm_over_single_copy": round(
            found[precision, "shm"]["transfer_s"] / found[precision, "single-copy"]["transfer_s"], 1
        )
        for precision in options.precision
    }
    return {
        "benchmark": "weight_sync",
        "device": cores(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "workload": {"model": MODEL, "num_parameters": rows[0]["num_parameters"], "num_syncs": options.num_syncs},
        "rows": rows,
        "headline": headline,
    }


def checkpoint(folder: Path, seed: int) -> Path:
    """A random model in bf16, and a tokenizer that nothing is encoded with."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=512, eos_token_id=1, **MODEL)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    vocab = {f"{i}": i for i in range(int(MODEL["vocab_size"]))}
    words = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", unk_token="0").save_pretrained(folder)
    return folder


def measure_way(
    options: argparse.Namespace, folder: Path, checkpoints: list[Path], precision: str, way: str
) -> dict[str, Any]:
    data = ["--prompt-data", str(checkpoints[0].parent / "train.jsonl"), "--hf-checkpoint", str(checkpoints[0])]
    where = ["--run-dir", str(folder), "--weight-sync", way, "--precision", precision]
    args = parse([*FLAGS.split(), *data, *where], "train")
    env = {"OMP_NUM_THREADS": str(num_usable_cpus()), "GLOO_SOCKET_IFNAME": "lo"}
    logs, memory = folder / "logs", Scratch(f"{SYNC}{os.getpid()}-", memory_root())
    workers, engine = WorkerGroup("actor", 1, logs, env), None
    threads = num_usable_cpus()
    try:
        spec, shared = plan_engines(args)[0], {MEMORY_VARIABLE: str(memory.path)}
        engine = start_engine(args, spec, num_threads=threads, log_dir=logs, env=shared)
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), threads, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        engine.wait_ready(600)
        sync = WeightSync(args, actor, way, memory.path, vocab_size=int(MODEL["vocab_size"]), max_len=256)
        transfers, proofs, sent = [], [], None
        for number in range(options.num_syncs + 1):
            if sync.way == SINGLE_COPY:
                sync.hold([engine])
            actor.load_weights(checkpoints[number % 2])
            began = time.monotonic()
            session = Session(args, actor, [engine], number + 1, memory.path)
            sent = session.transfer(way)
            transfers.append(time.monotonic() - began)
            sync.proof.prove(session, way, sent)
            proofs.append(time.monotonic() - began - transfers[-1])
        assert sent is not None
        numbers = {
            "num_parameters": sum(math.prod(t.shape) for t in sent.tensors),
            "bytes": sum(t.nbytes for t in sent.tensors),
        }
        seconds = {"transfer_s": median(transfers[1:]), "proof_s": median(proofs[1:])}
        raw = {"transfers": [round(s, 4) for s in transfers], "proofs": [round(s, 4) for s in proofs]}
        return {"precision": precision, "way": way, **seconds, **numbers, **raw}
    finally:
        workers.close()
        if engine is not None:
            engine.stop()
        memory.remove()


if __name__ == "__main__":
    main()
