"""Prompts from data files that are larger than the memory may be: seconds to the first batch, and memory.

    python benchmarks/data_files.py [--gigabytes 5] [--kinds jsonl parquet] [--folder DIR] [--out FILE]

Rows of about 4 kB (a conversation, a label, a solution in the metadata), of which one in 500 is over
--rollout-max-prompt-len, are read with a chat template and shuffled. Each start is a process of its own that does what
the controller does: it parses the command line, checks the file, loads it and takes a batch of 64 prompts; the first
start builds the index, the second one finds it, the third one too, with no file in the page cache. Memory is what the
resident set grows by at most, from when the tokenizer was loaded, over the start and 500 further batches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import cores
from random_model import make_model, prompt

HERE = Path(__file__).parent
BATCH, BATCHES, LIMIT, EVERY = 64, 500, 4000, 500
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant> "


def resident(field: str) -> int:
    """Bytes of the resident set of this process: VmRSS of now, VmHWM the highest since the last write to clear_refs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def start(words: list[str]) -> dict[str, Any]:
    """What the controller does with the data, timed."""
    from instep.arguments.parse import parse
    from instep.data.dataset import check_file
    from instep.data.formats import row_format
    from instep.data.source import RolloutDataSourceWithBuffer
    from instep.data.tokenizer import load_tokenizer

    args = parse(words, "train")
    load_tokenizer(str(args.hf_checkpoint), args.trust_remote_code)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.perf_counter()
    check_file(args.prompt_data, row_format(args), cache_path=args.data_cache_path)
    checked = time.perf_counter()
    source = RolloutDataSourceWithBuffer(args)
    loaded = time.perf_counter()
    source.get_samples(BATCH)
    first = time.perf_counter()
    for _ in range(BATCHES):
        source.get_samples(BATCH)
    return {
        "prompts": len(source),
        "too_long": sum(d.num_too_long for d in source.dataset.datasets) if source.dataset else 0,
        "check_s": checked - began,
        "load_s": loaded - checked,
        "first_batch_s": first - loaded,
        "to_first_batch_s": first - began,
        "batch_s": (time.perf_counter() - first) / BATCHES,
        "memory_mb": (resident("VmHWM") - before) / 1e6,
    }


def make_file(path: Path, num_bytes: float) -> None:
    """Rows until there are so many bytes; in a parquet file in groups of half a gigabyte, without compression."""
    rng = random.Random(0)
    texts = [prompt(8000 if i % EVERY == 0 else rng.randrange(60, 180), 512, i) for i in range(2 * EVERY)]
    solutions = [prompt(700, 512, -i) for i in range(len(texts))]

    def block(number: int) -> list[dict[str, Any]]:
        return [
            {
                "prompt": [{"role": "user", "content": f"number {number + i} : {text}"}],
                "label": str(number + i),
                "metadata": {"solution": solution, "level": 3},
            }
            for i, (text, solution) in enumerate(zip(texts, solutions, strict=True))
        ]

    number, bytes_of_block = 0, len(json.dumps(block(0)))
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            while file.tell() < num_bytes:
                file.writelines(json.dumps(row) + "\n" for row in block(number))
                number += len(texts)
        return
    import pyarrow
    import pyarrow.parquet

    writer = None
    while path.stat().st_size < num_bytes if writer else True:
        blocks = max(1, int(min(num_bytes, 5e8) / bytes_of_block))
        tables = [pyarrow.Table.from_pylist(block(number + i * len(texts))) for i in range(blocks)]
        number += blocks * len(texts)
        group = pyarrow.concat_tables(tables)
        if writer is None:
            options = {"use_dictionary": False, "compression": "none"}
            writer = pyarrow.parquet.ParquetWriter(path, group.schema, **options)
        writer.write_table(group, len(group))
    assert writer is not None
    writer.close()


def drop_from_page_cache(folder: Path) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(kind: str, folder: Path, gigabytes: float) -> dict[str, Any]:
    path, model, cache = folder / f"data.{kind}", folder / "model", folder / "cache"
    make_model(model, "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    make_file(path, gigabytes * 1e9)
    words = f"--hf-checkpoint {model} --prompt-data {path} --input-key prompt --label-key label --rm-type math "
    words += f"--apply-chat-template --rollout-max-prompt-len {LIMIT} --rollout-shuffle --rollout-batch-size {BATCH} "
    words += f"--num-epoch 1 --train-backend hf --actor-num-gpus-per-node 1 --data-cache-path {cache}"
    starts = []
    for name in ("first", "second", "cold"):
        if name == "cold":
            drop_from_page_cache(folder)
        command = [sys.executable, __file__, "--start", words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        starts.append({"start": name, **json.loads(done.stdout.splitlines()[-1])})
        print(kind, {k: round(v, 3) if isinstance(v, float) else v for k, v in starts[-1].items()}, flush=True)
    kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    row = {"kind": kind, "file_gb": path.stat().st_size / 1e9, "cache_gb": kept / 1e9, "starts": starts}
    path.unlink()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--kinds", nargs="+", default=["jsonl", "parquet"])
    parser.add_argument("--folder", type=Path, help="where the files are made; default: for temporary files")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "data-files-cpu.json")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        print(json.dumps(start(given.start.split())))
        return
    rows = []
    for kind in given.kinds:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            rows.append(measure(kind, Path(name), given.gigabytes))
    later = [one for row in rows for one in row["starts"][1:]]
    import torch
    import transformers

    result = {
        "benchmark": "data_files",
        "device": cores(),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "workload": {"batch": BATCH, "batches": BATCHES, "max_prompt_len": LIMIT, "gigabytes": given.gigabytes},
        "rows": rows,
        "headline": {
            "to_first_batch_s": max(one["to_first_batch_s"] for one in later),
            "memory_mb": max(one["memory_mb"] for row in rows for one in row["starts"]),
        },
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
