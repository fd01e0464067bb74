"""The peer of `benchmarks/gpu_grpo.py`: verl's GRPO, FSDP with vLLM colocated, on one GPU. Nothing of instep is used.

    python run_verl.py --model DIR --data train.jsonl --steps 4 --new-tokens 512 --limit 200 --out FILE [--tuned 32768]

`settings.py` has what is set, and why. FILE gets one JSON object with a row for each step: `seconds` between this row
of verl's log and the one before, and verl's own parts of it. verl runs in a process of its own, which ends with all
that Ray started, also after --limit seconds. Where FlashAttention does not work, sdpa takes its place, and says so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import settings  # noqa: E402

PARTS = {
    "generate": "gen",
    "log_probs": "old_log_prob",
    "advantages": "adv",
    "train": "update_actor",
    "sync": "update_weights",
    "verl_step": "step",
}
PACKAGES = ("verl", "vllm", "torch", "transformers", "ray", "tensordict", "flash-attn", "liger-kernel")
ENVIRONMENT = {
    "VLLM_PLUGINS": "",  # verl's vLLM has none of instep's
    "VLLM_DISABLE_COMPILE_CACHE": "0",  # verl's 1 would only make each start slower
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "RAY_TMPDIR": "/tmp",  # the paths of Ray's sockets are short
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a host whose MemTotal grows with use would lose its workers
    "RAY_DEDUP_LOGS": "0",
    "HYDRA_FULL_ERROR": "1",
}
PROBE = """
import torch
from flash_attn import flash_attn_varlen_func
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
q = torch.randn(192, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(192, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
ends = torch.tensor([0, 64, 192], device="cuda", dtype=torch.int32)
out = flash_attn_varlen_func(q, k, v, ends, ends, 128, 128, causal=True)
whole = [
    torch.nn.functional.scaled_dot_product_attention(
        *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    for a, b in ((0, 64), (64, 192))
]
expected = torch.cat(whole)
torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
seed = torch.randn_like(out)
for got, want in zip(torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(expected, (q, k, v), seed)):
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
logits = torch.randn(64, 151936, device="cuda", dtype=torch.bfloat16)
labels = torch.arange(64, device="cuda")
loss = cross_entropy_loss(logits.clone(), labels)[0]
whole = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
torch.testing.assert_close(loss, whole, rtol=0.01, atol=0.01)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--tuned", type=int, metavar="TOKENS", help="tuned settings, with micro-batches of TOKENS")
    parser.add_argument("--limit", type=float, required=True, help="seconds")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    folder = options.out.absolute().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=options.limit)
    print(f"FlashAttention: {probe.stderr[-1500:] or 'works'}", flush=True)
    make_tokenizer(options.model, folder)
    make_data(options.data, folder)
    words = settings.work(options.model, folder, options.steps, options.new_tokens)
    words += settings.tuned(options.tuned) if options.tuned else settings.DOCUMENTED
    words += settings.WITHOUT_FLASH_ATTENTION if probe.returncode else []
    words += options.set
    rows = run(words, folder, until)
    names = [name for name in PACKAGES if name != "flash-attn" or not probe.returncode]
    found = {"versions": {name: version(name) for name in names}, "settings": words, "steps": rows}
    options.out.write_text(json.dumps(found) + "\n")


def make_tokenizer(model: Path, folder: Path) -> None:
    """The model's tokenizer, whose last two words are those that verl wants of a Qwen's."""
    content = json.loads((model / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)[-2:]
    for word, name in zip(words, ("\n", "<|im_end|>"), strict=True):
        about = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        vocab[name] = vocab.pop(word)
        content["added_tokens"].append({"id": vocab[name], "content": name, "special": True, **about})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(model / "tokenizer_config.json", folder)
    shutil.copy(model / "config.json", folder)


def make_data(source: Path, folder: Path) -> None:
    """The prompts as verl reads them: messages, and the fields that its reward manager wants."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]
    table = {
        "prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
        "data_source": ["words"] * len(prompts),
        "reward_model": [{"style": "rule", "ground_truth": ""}] * len(prompts),
        "extra_info": [{"index": i} for i in range(len(prompts))],
    }
    pq.write_table(pa.table(table), folder / "train.parquet")


def run(words: list[str], folder: Path, until: float) -> list[dict[str, Any]]:
    """Run verl; returns a row for each step, with the time of its arrival.

    Raises: SystemExit if verl fails, or has not ended by `until`.
    """
    log = folder / "metrics.jsonl"
    log.write_text("")
    env = {**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(log)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what Ray leaves behind becomes a child of ours
    process = subprocess.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *words], cwd=folder, env=env)
    arrivals = [time.monotonic()]
    try:
        status = None
        while status is None and time.monotonic() < until:
            time.sleep(0.02)
            status = process.poll()  # first: then the last count has all rows
            num = log.read_bytes().count(b"\n")
            arrivals += [time.monotonic()] * (num + 1 - len(arrivals))
    finally:
        end_children()
    if status != 0:
        sys.exit(f"TimeoutError: verl has not ended after {len(arrivals) - 1} steps" if status is None else status)
    out = []
    for i, line in enumerate(log.read_text().splitlines()):
        data = json.loads(line)["data"]
        parts = {name: data[f"timing_s/{key}"] for name, key in PARTS.items() if f"timing_s/{key}" in data}
        out.append({"seconds": arrivals[i + 1] - arrivals[i], **parts, "metrics": data})
    return out


def end_children() -> None:
    """End all processes that descend from this one."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=5)


if __name__ == "__main__":
    main()
