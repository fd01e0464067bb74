"""`instep convert` against copying the same bytes on the same disk, each from a cold page cache to the disk.

    python benchmarks/convert.py [--size 0.6b] [--repeats 3] [--folder DIR] [--out FILE]

A random Qwen3 in bf16 is converted to Megatron's torch_dist and back; both read back and compare what they wrote. The
copy is shutil.copytree. All of them end when their files are on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import cores
from random_model import make_model

from instep.checkpoints.convert import main as convert

HERE = Path(__file__).parent


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def cold(folder: Path) -> None:
    """Bring the files to the disk, and out of the page cache, where what is mapped would stay."""
    gc.collect()
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(source: Path, target: Path, make: Callable[[], Any]) -> float:
    shutil.rmtree(target, ignore_errors=True)
    cold(source)
    began = time.perf_counter()
    make()
    for path in files(target):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began


def measure(hf: Path, root: Path) -> dict[str, float]:
    """Seconds of a conversion there and back, and of the copies of what each of them reads."""
    megatron, back, copy = root / "megatron", root / "back", root / "copy"
    there = ["hf-to-megatron", "--hf-checkpoint", str(hf), "--save", str(megatron)]
    return_ = ["megatron-to-hf", "--load", str(megatron), "--hf-checkpoint", str(hf), "--save", str(back)]
    row = {}
    for name, source, target, words in (
        ("hf-to-megatron", hf, megatron, there),
        ("megatron-to-hf", megatron, back, return_),
    ):
        row[name] = seconds(source, target, lambda words=words: convert(words))
        row[f"{name}, copy"] = seconds(source, copy, lambda source=source: shutil.copytree(source, copy))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: for temporary files")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "convert-cpu.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name, contextlib.redirect_stdout(io.StringIO()):
        hf = make_model(Path(name) / "hf", given.size)
        size = sum(path.stat().st_size for path in files(hf))
        measure(hf, Path(name))  # imports
        rows = [measure(hf, Path(name)) for _ in range(given.repeats)]
    middle = {key: median(row[key] for row in rows) for key in rows[0]}
    headline = {f"{way}_to_copy": middle[way] / middle[f"{way}, copy"] for way in ("hf-to-megatron", "megatron-to-hf")}
    for key, value in {"gigabytes": size / 1e9, **middle, **headline}.items():
        print(f"{key:24}{value:8.2f}")
    result = {
        "benchmark": "convert",
        "device": cores(),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "workload": {"model": f"qwen3-{given.size}, bf16", "gigabytes": round(size / 1e9, 2)},
        "rows": rows,
        "headline": headline,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
