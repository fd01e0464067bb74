"""The plans of the recipes: `python -m scripts.docs.recipes` writes them into recipes/*.yaml and recipes/README.md.

A recipe begins with `# key: text` lines. The plan is that of `instep plan` for H200s, from the measured profile
`benchmarks/results/card-nvidia-h200.json`, with responses of the maximum length; for CPUs, the memory of the host.
Models have their published shapes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

from instep.preflight.plan.command import plan
from tests.published import config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
CARD = ROOT / "benchmarks/results/card-nvidia-h200.json"
MODELS = {
    "Qwen/Qwen3-0.6B": "qwen3-0.6B",
    "Qwen/Qwen3-0.6B-Base": "qwen3-0.6B",
    "runs/sft-then-rl/sft/hf": "qwen3-0.6B",
    "Qwen/Qwen3-1.7B": "qwen3-1.7B",
    "Qwen/Qwen3-4B": "qwen3-4B",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5B",
    "Qwen/Qwen3-30B-A3B": "qwen3-30B-A3B",
}
GEMMA = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 640, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
    "vocab_size": 262144, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
H200 = 140  # GiB


def recipes() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"))


def head(path: Path) -> dict[str, str]:
    """The texts of a recipe's first lines: `what` without a key, then `hardware`, `needs`, `command`, ..."""
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    keyed = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"(\w+): *(.*)", line))}
    return {"what": lines[0], **keyed}


def words(path: Path) -> tuple[str, list[str]]:
    """The command of a recipe, and its words."""
    command = shlex.split(head(path)["command"].partition("instep ")[2])
    return command[0], [*command[1:-1], str(ROOT / command[-1])]


def make_models() -> None:
    """Make the shapes of the models in the current folder."""
    for name, shape in {
        **{name: config(shape) for name, shape in MODELS.items()},
        "models/gemma-3-270m": GEMMA,
    }.items():
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text(json.dumps(shape))
        Path(name, "model.safetensors").write_bytes(b"0")


def planned(path: Path) -> str:
    """What `instep plan` says of a recipe, in a folder with its models."""
    command, given = words(path)
    on_cpu, out = head(path)["hardware"].startswith("CPU"), io.StringIO()
    with contextlib.redirect_stdout(out):
        of_card = ["--card-profile", str(CARD), "--device", "cuda", "--gpu-memory-gb", str(H200)]
        plan([command, "--json", *given, *([] if on_cpu else of_card)])
    found = json.loads(out.getvalue())
    seconds, most = found["seconds"], max(max(gpus["need"].values()) for gpus in found["memory"])
    if on_cpu:
        return f"{most / 1e9:.0f} GB of memory"
    phases = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
    return f"{found['step_seconds']:.0f} s a step ({phases}), {most / 1e9:.0f} of {H200 * 2**30 / 1e9:.0f} GB of a GPU"


def readme() -> str:
    """recipes/README.md."""
    lines = [
        "# Recipes",
        "",
        "Made by `python -m scripts.docs.recipes`; do not edit.",
        "",
        "Each file has the flags of one run; its first lines say what it needs. From a clone, run its command:",
        "",
        "```bash",
        "instep train --config recipes/gsm8k-qwen3-0.6b.yaml --num-rollout 50   # words of the command line win",
        "instep plan train --config recipes/gsm8k-qwen3-0.6b.yaml               # --gpu-memory-gb 80: would it fit?",
        "instep train ... --dump-config mine.yaml                               # writes such a file from flags",
        "```",
        "",
        "Seconds and memory are those of `instep plan` with responses of the maximum length, from the profile of an",
        "H200 (`benchmarks/results/card-nvidia-h200.json`); shorter ones take less. Where no flag limits prompts or",
        "conversations, they have 1,024 tokens. `make_data.py` makes the data.",
        "",
        "| recipe | what | hardware | plan | curve |",
        "|---|---|---|---|---|",
    ]
    for path in recipes():
        of = head(path)
        lines.append(f"| [{path.stem}]({path.name}) | {of['what']} | {of['hardware']} | {of['plan']} | {of['curve']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    sys.path.append(str(ROOT / "examples/tool_use"))  # of a hook
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_models()
        for path in recipes():
            path.write_text(re.sub(r"(?m)^# plan:.*$", f"# plan: {planned(path)}", path.read_text()))
        (FOLDER / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
