"""The run of `instep atropos-train`: its output in the form of the original, as far as it is true, and its files."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.arguments.settings import HookSettings
from instep.system.atomic import link_or_copy
from instep_neighbours.atropos.trainer_flags import WITH_ADAPTER

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput

_DEBUG = "INSTEP_ATROPOS_DEBUG"
_TITLES = {
    "none": "LEGACY MODE (checkpoint + vLLM restart)",
    "shared_vllm": "SINGLE-COPY MODE (trainer and vLLM compute with one memory)",
    "lora_only": "LORA MODE (adapter-only training)",
    "lora_restart": "LORA MODE with its own vLLM (adapters are swapped while it runs, without a restart)",
}


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run `rollout.generate_rollout`; the first call prints what the original prints before its first step."""
    from instep_neighbours.atropos.rollout import generate_rollout as of_api

    if not getattr(data_source, "atropos_told", False):
        data_source.atropos_told = True
        print(*_begun(args, rollout_id), sep="\n", flush=True)
    return of_api(args, rollout_id, data_source, evaluation)


def _begun(args: HookSettings, rollout_id: int) -> list[str]:
    """Return the lines of a run whose engines have the trainer's weights."""
    out = []
    if args.weight_sync == "single-copy":
        from instep.weights.bridge import shared_folder

        tensors = json.loads((shared_folder(args.vllm_config_path) / "memory-0.json").read_text())["tensors"]
        if os.environ.get(_DEBUG):
            out += [f"[Debug] {name}: {about['shape']} {about['dtype']}" for name, about in tensors.items()]
        out += [f"[Setup] ✓ Attached {len(tensors)} tensors to vLLM's shared memory"]
        out += ["[Setup] ✓ Single-copy mode active - using vLLM's tensors directly!"]
    number = {"restart": "", "single-copy": "[2/2] "}.get(args.weight_sync, "[3/3] ")
    out.append(f"{number}Starting training for {args.num_rollout} steps")
    return [*out, f"Step {rollout_id + 1}/{args.num_rollout}"]


def train(flags: argparse.Namespace, args: Args) -> None:
    """Run step by step, with the output and the files of the original."""
    from instep import train_async, train_sync
    from instep.observability.output import lasting_output

    if flags.debug_loading:
        os.environ[_DEBUG] = "1"
    print(f"\n{'=' * 60}\n{_TITLES[flags.weight_bridge_mode]}\n{'=' * 60}", flush=True)
    began, rows, last = time.monotonic(), [], 0
    loops = {"train": train_sync.steps, "train-async": train_async.steps}
    with lasting_output(Path(args.run_dir) / "logs"):
        loop = loops[args.command](args)
        try:
            for step in loop:
                last = step.rollout_id + 1
                rows.append(step.metrics)
                _tell(flags, last, step.metrics)
                _keep_newest(args)
                if last < flags.training_steps:
                    print(f"Step {last + 1}/{flags.training_steps}", flush=True)
        finally:
            loop.close()
    if last:
        _leave(flags, Path(args.hf_checkpoint), last)
    print("\nTraining finished.", flush=True)
    if flags.benchmark:
        print(summary(flags, time.monotonic() - began, rows), flush=True)


def _tell(flags: argparse.Namespace, step: int, row: dict[str, float]) -> None:
    """Print the lines of a finished step."""
    if flags.weight_bridge_mode == "shared_vllm":
        print(f"  [SINGLE-COPY] Weights updated in-place - step {step}")
    loss, norm = row.get("train/loss", 0.0), row.get("train/grad_norm", 0.0)
    line = f"  Loss: {loss:.6f}" if abs(loss) < 0.01 else f"  Loss: {loss:.4f}"
    line += f", Grad norm: {norm:.4f}"
    if flags.benchmark:
        line += f", Step time: {row.get('perf/train_seconds', 0.0):.2f}s, Sync time: {_seconds(row, 'sync'):.2f}s"
        line += f", Data fetch: {_seconds(row, 'wait') or _seconds(row, 'rollout'):.2f}s"
        line += f", GPU mem: {row.get('perf/gpu_peak_bytes', 0.0) / 1e9:.2f}GB"
    print(line)
    ratio, clipped = math.exp(-row.get("train/ppo_kl", 0.0)), row.get("train/pg_clipfrac", 0.0)  # its geometric mean
    print(f"    GRPO: ratio={ratio:.3f}, clipped={clipped * 100:.1f}%", flush=True)


def _seconds(row: dict[str, float], phase: str) -> float:
    return row.get(f"perf/{phase}_seconds", 0.0)


def _keep_newest(args: Args) -> None:
    """Keep only the newest checkpoint for a resume: it is as large as weights, masters and moments."""
    folders = sorted(Path(args.save).glob("iter_*")) if args.save else []
    for folder in folders[:-1]:
        shutil.rmtree(folder)


def _leave(flags: argparse.Namespace, model: Path, step: int) -> None:
    """Create `final_model` or `final_adapter` from the files of the last step's folder, with an adapter's tokenizer."""
    save = Path(flags.save_path)
    adapter = flags.weight_bridge_mode in WITH_ADAPTER
    source = save / f"{'adapter_' if adapter else ''}step_{step}"
    target = save / ("final_adapter" if adapter else "final_model")
    if not source.is_dir():
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link_or_copy)
    if adapter:
        (save / "tokenizer").mkdir(exist_ok=True)
        for path in model.glob("*token*"):
            shutil.copy(path, save / "tokenizer")
    print(f"  Saved {target}", flush=True)


def summary(flags: argparse.Namespace, seconds: float, rows: Sequence[dict[str, float]]) -> str:
    """Return the table of `--benchmark`: seconds of all steps, and the peak of a rank's GPU memory."""
    fetch = "wait" if any("perf/wait_seconds" in row for row in rows) else "rollout"
    rule = "=" * 70
    lines = [rule, f"BENCHMARK SUMMARY ({flags.weight_bridge_mode})", rule]
    lines.append(f"  Total training time:     {seconds:.2f}s ({seconds / 60:.2f} min)")
    lines.append(f"  Total steps:             {len(rows)}")
    for title, phase in (("step", "train"), ("sync", "sync"), ("data fetch", fetch)):
        total = sum(_seconds(row, phase) for row in rows)
        lines.append(f"    Avg {title} time: {total / max(1, len(rows)):.2f}s, total {total:.2f}s")
    peak = max((row.get("perf/gpu_peak_bytes", 0.0) for row in rows), default=0.0)
    return "\n".join([*lines, f"  Peak GPU memory:       {peak / 1e9:.2f} GB", rule])
