"""The weight syncs of one GPU, or of two: `weight_sync.py --device cuda` runs this.

    python benchmarks/weight_sync_gpu.py [--size 0.6b 4b] [--only WAY SIZE:WAY ...] [--num-syncs 20] [--limit 540]

Each way has a trainer (hf, float32 masters) and a vLLM of its own, in a process that starts them (a cell). Cells start
side by side, in order as many as the memory takes, and are measured one after another while the others do nothing:
syncs with 64 requests in flight that stay in the engine (`--pause-mode keep`), syncs with none, tokens per second. The
trainer loads another checkpoint before every fifth sync. The first sync under requests does not count (`raw` has it).
The tokens per second of `lora` are also put in relation to those of `ipc` (or single-copy) in the same run, whose
engine has no adapters. Results go into `results/weight-sync-<device>.json`, where they replace those of the same ways
and sizes; its `headline` compares all rows with what is to be reached.
`--device cpu --size tiny` tries all of it without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import only_visible  # noqa: E402
from benchmarks.random_model import SIZES  # noqa: E402
from benchmarks.weight_sync_headline import headline  # noqa: E402
from scripts.gpu_main import compile_vllm  # noqa: E402
from scripts.gpu_vllm import end  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
AWAKE = "--no-offload-train --no-offload-rollout"
ONE_GPU = {  # flags of the ways between processes on one GPU
    "ipc": "--colocate --weight-sync ipc " + AWAKE,
    "single-copy": "--colocate --weight-sync single-copy",
    "lora": "--colocate --weight-sync lora --lora-rank 16 " + AWAKE,
    "shm": "--colocate --weight-sync shm " + AWAKE,
}
TWO_GPUS = {
    "nccl": "--weight-sync nccl --rollout-num-gpus 1",
    "single-copy-tp2": "--colocate --weight-sync single-copy --actor-num-gpus-per-node 2 "
    "--tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2 --vllm-disable-custom-all-reduce",
}
WAYS = ONE_GPU | TWO_GPUS
ALSO = {"ipc": ["shm"]}  # ways that the engine of another takes, too: one start less
GB_PER_CELL = {"tiny": 1, "0.5b": 16, "0.6b": 16, "1.7b": 32, "4b": 70, "8b": 125}  # trainer and engine
LARGE = ("4b", "8b")
START_SECONDS = 240.0
MEASURE_SECONDS, OF_LARGE = 90.0, 200.0  # a large model is loaded before each sync by single copy


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["0.6b"])
    parser.add_argument("--only", nargs="+", help=f"of {', '.join(WAYS)}; default: those of one GPU, or of two")
    parser.add_argument("--num-syncs", type=int, default=20)
    parser.add_argument("--at-once", type=int, help="cells; default: as many as the memory of the GPU takes")
    parser.add_argument("--flags", default="", help="more flags, such as '--vllm-enforce-eager'")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "instep-models")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "instep-weight-sync")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/weight-sync-<device>.json")
    options = parser.parse_args(words)
    deadline = time.monotonic() + options.limit
    options.logs.mkdir(parents=True, exist_ok=True)
    compile_vllm()
    machine = rates(options.device)
    ways = options.only or list(TWO_GPUS if machine["num_gpus"] > 1 else ONE_GPU)
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['num_gpus']}x {machine['device']}".lower())
    out = options.out or RESULTS / f"weight-sync-{name}.json"
    pairs = [(size, way) for size in options.size for way in ways if ":" not in way]
    pairs += [(size, way) for size, _, way in (word.partition(":") for word in ways) if way]
    if unknown := [pair for pair in pairs if pair[0] not in SIZES or pair[1] not in WAYS]:
        parser.error(f"--only: no such size or way: {unknown}")
    for size in dict.fromkeys(size for size, _ in pairs):
        for seed in range(1 if size in LARGE else 2):
            make = [sys.executable, "benchmarks/random_model.py", size, str(options.models / f"{size}-{seed}")]
            subprocess.run([*make, "--device", options.device, "--seed", str(seed)], cwd=ROOT, check=True)
    (options.models / "train.jsonl").write_text('{"prompt": "w5"}\n')
    rows: list[dict[str, Any]] = []
    while pairs:
        needed = itertools.accumulate(GB_PER_CELL[size] for size, _ in pairs)
        at_once = options.at_once or max(1, sum(gb <= machine["memory_gb"] for gb in needed))
        rows += wave(options, pairs[:at_once], deadline)
        pairs = pairs[at_once:]
    for row in rows:
        num_parameters = (options.models / f"{row['size']}-0" / "model.safetensors").stat().st_size // 2
        row |= floors(row["way"], num_parameters, machine)
        same = [r for r in rows if r["size"] == row["size"] and r["way"] in ("ipc", "single-copy")]
        merged = [r["tokens_per_s"] for r in same if "tokens_per_s" in r]  # of engines without adapters, in this run
        if row["way"] == "lora" and merged and "tokens_per_s" in row:
            row |= {"tokens_per_s_without": merged[0], "of_without": row["tokens_per_s"] / merged[0]}
            print(f"{row['size']}: {row['of_without']:.2f} of the tokens/s without adapters", flush=True)
    write(out, machine, rows, options.num_syncs)
    return 0 if all("error" not in row for row in rows) else 1


def rates(device: str) -> dict[str, Any]:
    """What the hardware does, measured in a process of its own, which gives its memory back."""
    code = f"from benchmarks.weight_sync_gpu import measured_rates; measured_rates({device!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(machine), flush=True)
    return machine


def measured_rates(device: str) -> None:
    """Print the GPU's name and memory, and its rates: of a copy (bytes read and written), of a 1-GiB broadcast."""
    import torch

    found: dict[str, Any] = {"device": "cpu", "num_gpus": 0, "memory_gb": 8.0, "copy_gb_per_s": None}
    if device == "cuda":
        names = torch.cuda.get_device_name(0)
        found = {"device": names, "num_gpus": torch.cuda.device_count()}
        found["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
        blocks = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
        found["copy_gb_per_s"] = (2 << 30) / 1e9 / _fastest(lambda: blocks[0].copy_(blocks[1]), 0)
        if torch.cuda.device_count() > 1:
            ends = [blocks[0], blocks[1].to("cuda:1")]
            found["broadcast_gb_per_s"] = (1 << 30) / 1e9 / _fastest(lambda: torch.cuda.nccl.broadcast(ends), 0)
    print(json.dumps(found))


def _fastest(call: Any, gpu: int) -> float:
    import torch

    found = []
    for _ in range(10):
        torch.cuda.synchronize(gpu)
        began = time.monotonic()
        call()
        for other in range(torch.cuda.device_count()):
            torch.cuda.synchronize(other)
        found.append(time.monotonic() - began)
    return min(found)


class Cell:
    """The process of one way, which answers with JSON lines."""

    def __init__(self, options: argparse.Namespace, size: str, way: str):
        self.size, self.way = size, way
        name = f"{size}-{way}"
        order = {"size": size, "device": options.device, "num_syncs": options.num_syncs}
        order["seconds"] = self.seconds = OF_LARGE if size in LARGE else MEASURE_SECONDS
        order |= {"models": str(options.models), "run_dir": str(options.logs / name)}
        order |= {"flags": f"{WAYS[way]} {options.flags}"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        env.setdefault("VLLM_CACHE_ROOT", str(options.models / "vllm-cache"))  # the second start of an engine is warm
        command = [sys.executable, "benchmarks/weight_sync_cell.py", json.dumps(order)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._log = options.logs / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=log, start_new_session=True, **pipes)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line, or an error."""
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            line = '{"error": "it took too long"}'
        if not line:
            words = [w for w in self._log.read_text(errors="replace").splitlines() if "Error" in w]
            return {"error": words[-1][:400] if words else f"it ended: see {self._log}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def measure(self, way: str, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{way.removesuffix('-tp2')}\n")
            self._process.stdin.flush()
        return self.answer(seconds)

    def stop(self, wait: bool = False) -> None:
        """End it; with `wait` return when its engine and its worker, too, have ended, after 30 s at most."""
        theirs = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        end([self._process])
        psutil.wait_procs(theirs, timeout=30 if wait else 0)


def wave(options: argparse.Namespace, pairs: list[tuple[str, str]], deadline: float) -> list[dict[str, Any]]:
    """Start the cells of some sizes and ways at once, and measure one after another; one that fails gives an error."""

    def left(most: float) -> float:
        return min(most, deadline - time.monotonic())

    also = {
        (size, way): [(size, other) for other in ALSO.get(way, ()) if (size, other) in pairs] for size, way in pairs
    }
    shared = {pair for others in also.values() for pair in others}
    cells = [Cell(options, *pair) for pair in pairs if pair not in shared]
    rows: list[dict[str, Any]] = []
    try:
        until = time.monotonic() + START_SECONDS
        ready = [cell.answer(left(until - time.monotonic())) for cell in cells]
        for cell, answer in zip(cells, ready, strict=True):
            of_cell = []
            for size, way in [(cell.size, cell.way), *also[cell.size, cell.way]]:
                found = answer if "error" in answer else cell.measure(way, left(2 * cell.seconds))
                of_cell.append({"size": size, "way": way, **found})
                print(json.dumps({name: value for name, value in of_cell[-1].items() if name != "raw"}), flush=True)
            rows += of_cell
            before = used_gb()
            cell.stop(wait=True)
            if before is not None and (after := used_gb()) is not None:
                of_cell[0]["gpu_gb"] = round(before - after, 2)  # of its processes, with what their allocators keep
    finally:
        for cell in cells:
            cell.stop()
    return rows


def floors(way: str, num_parameters: int, machine: dict[str, Any]) -> dict[str, float]:
    """The seconds that the bytes of a way take at the measured rates, where it should come near them.

    Single copy reads float32 masters and writes bf16 weights, 6 bytes a parameter on each GPU's own share.
    """
    found: dict[str, float] = {"num_parameters": num_parameters}
    if way.startswith("single-copy") and machine["copy_gb_per_s"]:
        gpus = 2 if way.endswith("tp2") else 1
        found["floor"] = 6 * num_parameters / gpus / machine["copy_gb_per_s"] / 1e9
    if way == "nccl" and "broadcast_gb_per_s" in machine:
        found["floor"] = 2 * num_parameters / machine["broadcast_gb_per_s"] / 1e9
    return found


def used_gb() -> float | None:
    """What all processes use of the GPUs that are seen here; None where nvidia-smi does not tell it."""
    query = ["nvidia-smi", *only_visible(), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(map(float, done.stdout.split())) * 2**20 / 1e9


def write(out: Path, machine: dict[str, Any], rows: list[dict[str, Any]], num_syncs: int) -> None:
    """Put the rows into the file, in place of those of the same sizes and ways."""
    from instep.observability.versions import versions

    new = {(row["size"], row["way"]) for row in rows}
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    kept = [row for row in old if (row["size"], row["way"]) not in new]
    found = {"benchmark": "weight_sync", "date": time.strftime("%Y-%m-%d"), "versions": versions(), **machine}
    rows = [*kept, *rows]
    reached = headline(rows, machine["num_gpus"])
    out.write_text(json.dumps({**found, "num_syncs": num_syncs, "rows": rows, "headline": reached}, indent=1) + "\n")
    for name, figure in reached.items():
        print(f"{name}: {figure['measured']} ({figure['target']}), met: {figure['met']}")
    print(f"written: {out}")


if __name__ == "__main__":
    sys.exit(main())
