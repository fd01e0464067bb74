"""Compare what two trees compute on one machine: small deterministic runs of every algorithm and of other paths.

    python scripts/golden.py record TREE OUT.json [WORD ...]   the cases whose names hold one of the words; default: all
    python scripts/golden.py compare BEFORE.json AFTER.json

TREE is a checkout; the Python that runs this script must have instep's dependencies. A record holds of each run the
metrics without times and memory, the digests of the exported weights, and one of its samples (tokens, log-probs,
rewards). Other machines may give other bits. One case takes 20 to 60 s on 2 cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REWARD = """
async def reward(args, sample, **kwargs):
    return float(sum(sample.tokens[-sample.response_length :]) % 2)
"""
TWO_STEPS = "--num-steps-per-rollout 2"
MEGATRON = f"{TWO_STEPS} --train-backend megatron"
TWO_RANKS = "--actor-num-gpus-per-node 2"
ALGORITHMS = "grpo gspo cispo sapo dppo_tv dppo_kl dr_grpo rloo max_rl reinforce_plus_plus reinforce_plus_plus_baseline"
CASES = {f"alg-{name}": f"{TWO_STEPS} --advantage-estimator {name}" for name in ALGORITHMS.split()} | {
    "alg-ppo": f"{TWO_STEPS} --advantage-estimator ppo --critic-lr 5e-3 --gamma 1 --lambd 0.95 --normalize-advantages "
    "--kl-coef 0.01 --kl-loss-type k2",
    "kl-loss": f"{TWO_STEPS} --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --entropy-coef 0.001",
    "kl-coef": f"{TWO_STEPS} --kl-coef 0.02 --kl-loss-type k3",
    "tis": f"{TWO_STEPS} --use-tis --tis-clip 2.0",
    "opsm": f"{TWO_STEPS} --use-opsm",
    "per-token": f"{TWO_STEPS} --calculate-per-token-loss",
    "dual-clip": f"{TWO_STEPS} --eps-clip 0.1 --eps-clip-high 0.3 --eps-clip-c 3",
    "megatron": MEGATRON,
    "megatron-gspo": f"{MEGATRON} --advantage-estimator gspo",
    "megatron-tp2": f"{MEGATRON} {TWO_RANKS} --tensor-model-parallel-size 2 --sequence-parallel",
    "megatron-pp2": f"{MEGATRON} {TWO_RANKS} --pipeline-model-parallel-size 2",
    "hf-dp2": f"{TWO_STEPS} {TWO_RANKS}",
    "hf-tp2": f"{TWO_STEPS} {TWO_RANKS} --tensor-model-parallel-size 2",
    "lora": f"{TWO_STEPS} --lora-rank 4 --weight-sync lora",
    "disk": "--weight-sync disk",
    "single-copy": "--weight-sync single-copy",
    "bf16-8bit": f"{TWO_STEPS} --precision bf16 --optimizer adamw_8bit",
    "dynamic": f"{TWO_STEPS} --use-dynamic-batch-size --max-tokens-per-gpu 512",
    "async": "train-async --max-staleness 1",
    "resume": "resume",
}
# Parts of the names of metrics that differ from run to run.
VARIES = ("perf/", "memory", "time", "seconds", "pss", "sync/probe_", "wall", "async/", "rollout/num_requests")


def run(tree: Path, work: Path, words: list[str]) -> str:
    """Run `instep` of a tree; return the end of stderr where it failed, or an empty text."""
    env = os.environ | {"PYTHONPATH": f"{tree}:{work}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "instep.cli", *words]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=900)
    return done.stderr[-1500:] if done.returncode else ""


def record_case(tree: Path, work: Path, name: str) -> dict[str, Any]:
    """Run one case; return its record, or its error."""
    run_dir, words = work / name, CASES[name].split()
    command = words.pop(0) if words[0] == "train-async" else "train"
    resumes = words == ["resume"]
    flags = {
        "--hf-checkpoint": work / "tiny/hf", "--prompt-data": work / "tiny/train.jsonl", "--input-key": "prompt",
        "--label-key": "label", "--custom-rm-path": "golden_reward.reward", "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 4, "--rollout-max-response-len": 16, "--num-rollout": 3, "--lr": 1e-3,
        "--train-backend": "hf", "--actor-num-gpus-per-node": 1, "--num-threads": 1, "--device": "cpu", "--seed": 7,
        "--save": run_dir / "ckpt", "--save-hf": run_dir / "hf", "--save-interval": 1 if resumes else 3,
        "--run-dir": run_dir,
    }  # fmt: skip
    fixed = [str(word) for flag, value in flags.items() if flag not in words for word in (flag, value)]
    argv = [command, *fixed, "--apply-chat-template", "--deterministic-mode", *([] if resumes else words)]
    if resumes:
        if error := run(tree, work, [*argv, "--num-rollout", "2"]):
            return {"error": error}
        argv += ["--load", str(run_dir / "ckpt")]
    if error := run(tree, work, argv):
        return {"error": error}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    known = [{k: v for k, v in sorted(s.items()) if k not in ("metadata", "engine", "spans")} for s in samples]
    return {
        "metrics": [{k: v for k, v in sorted(row.items()) if not any(part in k for part in VARIES)} for row in rows],
        "samples": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        "weights": {
            str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((run_dir / "hf").rglob("*.safetensors"))
        },
    }


def record(tree: Path, out: Path, words: list[str]) -> None:
    """Record the cases of a tree in `out`, which keeps those of earlier calls."""
    found = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        work = Path(folder)
        (work / "tiny").mkdir()
        (work / "golden_reward.py").write_text(REWARD)
        make = "import sys; from pathlib import Path; from tests.assets import make_checkpoint, make_prompts\n"
        make += "root = Path(sys.argv[1]); make_checkpoint(root / 'hf'); make_prompts(root / 'train.jsonl', 64)"
        subprocess.run([sys.executable, "-c", make, str(work / "tiny")], cwd=tree, check=True)
        for name in (name for name in CASES if not words or any(word in name for word in words)):
            found[name] = record_case(tree.resolve(), work, name)
            print(name, found[name].get("error", "recorded"), flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")


def compare(before: Path, after: Path) -> int:
    """Print a line for each case of both files; return how many differ."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    num = 0
    for name in (name for name in old if name in new):
        parts = [part for part in ("error", "weights", "samples") if old[name].get(part) != new[name].get(part)]
        rows = zip(old[name].get("metrics", []), new[name].get("metrics", []), strict=False)
        metrics = {k: (a.get(k), b.get(k)) for a, b in rows for k in {*a, *b} if a.get(k) != b.get(k)}
        num += bool(parts or metrics)
        print(f"{name:32}", "same" if not parts and not metrics else f"{parts} {dict(sorted(metrics.items())[:5])}")
    return num


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    paths = Path(sys.argv[2]), Path(sys.argv[3])
    sys.exit(compare(*paths) if sys.argv[1] == "compare" else record(*paths, sys.argv[4:]))
