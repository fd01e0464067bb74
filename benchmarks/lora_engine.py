"""What an adapter costs an engine: vLLM without adapters, with its own kernels for them, and with instep's.

    python benchmarks/lora_engine.py [--size 4b] [--device cuda] [--rank 16] [--flags '{"enforce_eager": true}']

Three engines, one after the other, each in a process of its own: `base`, `stock`, and `joined`, which is
`instep_engine.vllm.fast.adapter`. Each prints the tokens/s of 64 responses at once, the median of five such loads. With
the same prompts the log-probs of both ways of adapters are compared: without an adapter, with one, in a batch of both,
and after another was loaded; and those of responses with what the same engine gives them as a part of the prompt
(`decoded`). Results go into `results/lora-engine-<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.random_model import SIZES, make_model  # noqa: E402

KINDS = ("base", "stock", "joined")
REQUESTS, PROMPT, RESPONSE, LOADS = 64, 128, 256, 5
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = [*ADAPTED, "qkv_proj", "gate_up_proj"]  # in vLLM some are one layer
# How much the log-probs of both ways may differ, of float32 and, as a part of what the adapter changes, of bf16.
CLOSE, CLOSE_IN_BF16 = 1e-5, 0.1


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--requests", type=int, help=f"at once, to measure tokens/s (default {REQUESTS}); 0: none")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "instep-models")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/lora-engine-<device>.json")
    options = parser.parse_args(words)
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = options.size or ("4b" if device == "cuda" else "tiny")
    num = options.requests if options.requests is not None else REQUESTS if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    make_model(options.models / f"{size}-0", size, device=device)
    adapters = [make_adapter(options.models, size, options.rank, seed) for seed in (1, 2)]
    rows = []
    for kind in options.only:
        order = {"kind": kind, "model": str(options.models / f"{size}-0"), "adapters": [str(a) for a in adapters]}
        order |= {"device": device, "rank": options.rank, "requests": num, "flags": options.flags}
        rows.append({"size": size, "rank": options.rank, **run_cell(order)})
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "log_probs"}), flush=True)
    found = compare({row["kind"]: row["log_probs"] for row in rows})
    decoded = {row["kind"]: row["decoded"] for row in rows}
    rows = [{name: value for name, value in row.items() if name != "log_probs"} for row in rows]
    rates = {row["kind"]: row["tokens_per_s"] for row in rows if row["tokens_per_s"]}
    headline = {f"{kind}_of_base": rates[kind] / rates["base"] for kind in rates if "base" in rates}
    print(json.dumps({"headline": headline, "log_probs": found}, indent=1), flush=True)
    about = {"benchmark": "lora_engine", "device": name, "date": time.strftime("%Y-%m-%d")}
    workload = {"requests": num, "prompt": PROMPT, "response": RESPONSE, "flags": options.flags}
    if num:
        from instep.observability.versions import versions

        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())
        out = options.out or ROOT / "benchmarks" / "results" / f"lora-engine-{slug}.json"
        about |= {"versions": versions(), "workload": workload, "rows": rows, "headline": headline, "log_probs": found}
        out.write_text(json.dumps(about, indent=1) + "\n")
    close = all(
        part["max"] <= CLOSE if device == "cpu" else part["mean"] <= CLOSE_IN_BF16 * part["adapter"]
        for part in found.values()
    )
    noise = CLOSE if device == "cpu" else 2 * decoded.get("base", {"mean": 0.02})["mean"]
    close &= all(part["mean"] <= noise for part in decoded.values())
    print("joined and stock agree" if close else "joined and stock DIFFER")
    return 0 if close else 1


def compare(log_probs: dict[str, dict[str, list[list[float]]]]) -> dict[str, dict[str, float]]:
    """How the log-probs of prompts differ between both ways of adapters, and what the adapter changes of them.

    A batch of requests with and without the adapter is compared with the two kinds alone: vLLM on a CPU gives all
    requests of such a batch the adapter.
    """
    if not {"stock", "joined"} <= log_probs.keys():
        return {}
    stock, joined = log_probs["stock"], log_probs["joined"]
    want = {**stock, "mixed": [stock["one" if i % 2 == 0 else "none"][i] for i in range(len(stock["none"]))]}
    found = {}
    for name in joined:
        gaps = [abs(a - b) for x, y in zip(want[name], joined[name], strict=True) for a, b in zip(x, y, strict=True)]
        ours = [abs(a - b) for x, y in zip(stock["one"], stock["none"], strict=True) for a, b in zip(x, y, strict=True)]
        found[name] = {"max": max(gaps), "mean": statistics.mean(gaps), "adapter": statistics.mean(ours)}
    return found


def make_adapter(folder: Path, size: str, rank: int, seed: int) -> Path:
    """An adapter of all linear layers in peft's format, whose product is about 0.3 of the layer's own."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / f"{size}-adapter-{rank}-{seed}"
    if (path / "adapter_config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(folder / f"{size}-0" / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in ADAPTED:
            gain = 0.02 * shape[1] ** 0.5  # of the layer, whose weights are as large
            a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            b = torch.randn(shape[0], rank, generator=generator) * rank**-0.5 * 0.3 * gain
            tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config = {**about, "target_modules": ADAPTED, "base_model_name_or_path": str(folder / f"{size}-0")}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def run_cell(order: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    if order["device"] == "cpu":
        env |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/lora_engine.py", "--cell", json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    said = list(dict.fromkeys(re.findall(r"instep: (.*(?:adapter|product).*)", done.stdout + done.stderr)))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    if done.returncode or not lines:
        raise SystemExit(f"{order['kind']} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
    return {**json.loads(lines[-1]), "said": said}


def cell(order: dict[str, Any]) -> None:
    """One engine in this process: print what it answers, and how fast."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # before the variable is set: requests here name their adapters, or none
    on_gpu, kind = order["device"] == "cuda", order["kind"]
    flags: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(8, order["requests"]), "seed": 0}
    flags |= {"gpu_memory_utilization": 0.6} if on_gpu else {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    flags |= {"dtype": "bfloat16" if on_gpu else "float32", "max_logprobs": 1}
    flags |= {} if on_gpu else {"distributed_executor_backend": "uni", "enable_chunked_prefill": False}
    if kind != "base":
        flags |= {"enable_lora": True, "max_lora_rank": order["rank"], "lora_target_modules": TARGETS}
        os.environ["INSTEP_LORA"] = "1"
    if kind == "joined":
        flags["additional_config"] = {"instep_adapter": 1}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(order["model"], **{**flags, **order["flags"]})
    one, other = [LoRARequest(f"adapter-{i}", i, path) for i, path in enumerate(order["adapters"], 1)]
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 3 for j in range(40 + i)]} for i in range(6)]
    score = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def scores(adapters: Any) -> list[list[float]]:
        answers = llm.generate(prompts, score, lora_request=adapters, use_tqdm=False)
        return [[next(iter(found.values())).logprob for found in answer.prompt_logprobs[1:]] for answer in answers]

    batches = {"none": None, "one": [one] * 6, "mixed": [one, None] * 3, "other": [other] * 6, "again": [one] * 6}
    log_probs = {name: scores(which) for name, which in batches.items() if kind != "base" or name == "none"}
    decoded = answered(llm, prompts, None if kind == "base" else [one, None] * 3)
    rates = []
    draw = SamplingParams(temperature=1.0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False)
    for seed in range(LOADS + 1 if order["requests"] else 0):
        ids = [[(31 * i + 17 * j + seed) % 500 + 3 for j in range(PROMPT)] for i in range(order["requests"])]
        began = time.monotonic()
        with_it = [one] * len(ids) if kind != "base" else None
        llm.generate([{"prompt_token_ids": each} for each in ids], draw, lora_request=with_it, use_tqdm=False)
        rates.append(len(ids) * RESPONSE / (time.monotonic() - began))
    rate = statistics.median(rates[1:]) if rates else None  # the first load warms up
    found = {"kind": kind, "tokens_per_s": rate, "rates": rates, "decoded": decoded, "log_probs": log_probs}
    print(json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # at the interpreter's end a thread of vLLM's aborts the process now and then


def answered(llm: Any, prompts: list[dict[str, Any]], adapters: Any) -> dict[str, float]:
    """How the log-probs of responses differ from those of the same tokens in a prompt."""
    from vllm import SamplingParams

    draw = SamplingParams(temperature=1.0, max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
    score = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = [a.outputs[0] for a in llm.generate(prompts, draw, lora_request=adapters, use_tqdm=False)]
    pairs = zip(prompts, answers, strict=True)
    whole = [{"prompt_token_ids": [*prompt["prompt_token_ids"], *answer.token_ids]} for prompt, answer in pairs]
    again = llm.generate(whole, score, lora_request=adapters, use_tqdm=False)
    gaps = []
    for answer, scored in zip(answers, again, strict=True):
        in_prompt = scored.prompt_logprobs[-len(answer.token_ids) :]
        for token, first, second in zip(answer.token_ids, answer.logprobs, in_prompt, strict=True):
            gaps.append(abs(first[token].logprob - second[token].logprob))
    return {"max": max(gaps), "mean": statistics.mean(gaps)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        cell(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
