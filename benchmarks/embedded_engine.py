"""The embedded engine, through HTTP as a client sees it, against batched `model.generate` of transformers.

    python benchmarks/embedded_engine.py [--device cpu] [--threads 2] [--out FILE]

Same model (a random Qwen3 of the quickstart's shape), threads, prompts and sampling (temperature 1, no truncation, EOS
ignored); `generate` computes no log-probs. At lengths that vary, `generate` runs until its longest response
ends, and only the tokens that were asked for count. The two are measured in turn, five times; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from instep.system.processes import OPENMP_ENV
from instep_engine.guard import EVERYONE, GENERATE_VARIABLE, KEY_VARIABLE

sys.path.insert(0, str(Path(__file__).parent))
from machine import cores  # noqa: E402

PROMPT_LENGTH = 19  # as in the quickstart
# The lengths of the quickstart's first 64 held-out responses before RL (seed 0, temperature 1).
QUICKSTART = [4, 24, 24, 24, 4, 4, 24, 4, 4, 4, 4, 4, 4, 16, 16, 4, 4, 4, 4, 4, 4, 4, 16, 16]
QUICKSTART += [16, 4, 4, 28, 28, 16, 24, 4, 4, 16, 20, 4, 4, 20, 4, 20, 28, 4, 4, 4, 4, 4, 4, 16]
QUICKSTART += [4, 16, 24, 4, 16, 4, 4, 4, 4, 24, 24, 4, 4, 4, 28, 4]


def uniform(count: int, low: int, high: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randint(low, high) for _ in range(count)]


# Requests of one prompt each (the samples of a group), and the number of new tokens of each request.
WORKLOADS: dict[str, tuple[int, list[int]]] = {
    "equal_64": (1, [48] * 64),
    "quickstart_64": (1, QUICKSTART),
    "quickstart_64_groups_of_8": (8, QUICKSTART),
    "uniform_64": (1, uniform(64, 8, 96)),
    "uniform_256_groups_of_8": (8, uniform(256, 8, 96)),
}


def make_model(path: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=317,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    words = WordLevel({str(i): i for i in range(317)}, unk_token="0")  # an engine has a tokenizer; tokens go in and out
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path)
    return model.eval()


@contextlib.contextmanager
def engine(path: Path, device: str, threads: int) -> Iterator[str]:
    """Run an engine; the value is its URL."""
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(path), "--port", "0", "--device", device]
    command += ["--max-num-seqs", "256"]
    environment = (
        os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": str(threads)} | OPENMP_ENV
    )
    environment |= {KEY_VARIABLE: "benchmark", GENERATE_VARIABLE: EVERYONE}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait(timeout=10)


async def run_engine(session: aiohttp.ClientSession, url: str, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds from the first request sent to the last response read."""

    async def one(prompt: list[int], length: int) -> int:
        params = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        async with session.post(
            f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params}
        ) as r:
            choice = (await r.json())["choices"][0]
            return len(choice["logprobs"]["content"])

    begin = time.perf_counter()
    got = await asyncio.gather(*(one(p, n) for p, n in zip(prompts, lengths, strict=True)))
    seconds = time.perf_counter() - begin
    assert got == lengths
    return seconds


def run_generate(model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: list[int]) -> float:
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=model.device)
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(lengths),
    ).tolist()
    seconds = time.perf_counter() - begin
    assert len(out[0]) == PROMPT_LENGTH + max(lengths)
    return seconds


async def measure(args: argparse.Namespace) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder)).to(args.device)
        connector = aiohttp.TCPConnector(limit=0)  # one session throughout, as a rollout has
        with engine(Path(folder), args.device, args.threads) as url:
            async with aiohttp.ClientSession(connector=connector) as session:
                for name, workload in WORKLOADS.items():
                    rows.append(await compare(session, url, model, name, *workload, args.repeats))
    return rows


async def compare(
    session: aiohttp.ClientSession,
    url: str,
    model: Qwen3ForCausalLM,
    name: str,
    group: int,
    lengths: list[int],
    repeats: int,
) -> dict:
    """Measure one row: both ways in turn, `repeats` times after a warm-up."""
    rng = random.Random(0)
    distinct = [[rng.randrange(3, 317) for _ in range(PROMPT_LENGTH)] for _ in range(len(lengths) // group)]
    prompts = [prompt for prompt in distinct for _ in range(group)]
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    for repeat in range(repeats + 1):
        pair = {
            "engine": await run_engine(session, url, prompts, lengths),
            "generate": run_generate(model, prompts, lengths),
        }
        for key, seconds in pair.items():
            times[key] += [seconds] if repeat else []
    rate = {key: sum(lengths) / statistics.median(values) for key, values in times.items()}
    return {
        "workload": name,
        "num_tokens": sum(lengths),
        "engine_tokens_per_s": round(rate["engine"]),
        "generate_tokens_per_s": round(rate["generate"]),
        "ratio": round(rate["engine"] / rate["generate"], 3),
        "seconds": {k: [round(x, 4) for x in v] for k, v in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    rows = asyncio.run(measure(args))
    result = {
        "benchmark": "embedded-engine",
        "device": cores() if args.device == "cpu" else torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "workload": {
            "model": "Qwen3, hidden 192, 2 layers, vocabulary 317, float32",
            "prompt_length": PROMPT_LENGTH,
            "threads": args.threads,
            "repeats": args.repeats,
            "group_size_and_lengths": WORKLOADS,
        },
        "rows": rows,
        "headline": {f"ratio_to_generate_{row['workload']}": row["ratio"] for row in rows},
    }
    out = args.out or Path(__file__).parent / "results" / f"embedded-engine-{args.device}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'workload':<26}{'engine tok/s':>14}{'generate tok/s':>16}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['workload']:<26}{row['engine_tokens_per_s']:>14}{row['generate_tokens_per_s']:>16}{row['ratio']:>8}"
        )


if __name__ == "__main__":
    main()
