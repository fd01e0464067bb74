"""`instep train --help` and docs/arguments.md, both made from the records.

`python -m instep.arguments.help > docs/arguments.md` writes the latter.
"""

from __future__ import annotations

import textwrap
from typing import Any

from instep.arguments.engine_help import summary
from instep.arguments.flag import Flag
from instep.arguments.serving import SERVED
from instep.arguments.table import GROUPS, own_flags, passed_through

SERVE_EXAMPLE = """\
Example: two engines behind the router, then a request from another terminal
  instep serve --hf-checkpoint models/tiny --rollout-num-gpus 2 --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "models/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
Any OpenAI client works: docs/engines.md, "OpenAI clients".
"""
EXAMPLE = """\
Example: GRPO on a CPU, with a built-in reward
  instep train --hf-checkpoint models/tiny --prompt-data train.jsonl --input-key prompt --label-key label \\
    --apply-chat-template --rm-type math --num-rollout 50 --rollout-batch-size 16 --n-samples-per-prompt 8 \\
    --rollout-max-response-len 128 --actor-num-gpus-per-node 1 --lr 1e-4 \\
    --eval-prompt-data held-out eval.jsonl --eval-interval 10 --save runs/mine/checkpoints --run-dir runs/mine
"""

_INTRO = {
    "train": "Train a language model with reinforcement learning: rollout, reward, step, weight sync, again.",
    "sft": "Supervised fine-tuning through the same trainer; needs no engine. --rollout-batch-size counts samples.",
    "dpo": "Direct preference optimization of pairs (prompt, chosen, rejected) through the same trainer; needs no "
    "engine. Batch sizes count pairs; the reference is --ref-load, by default --hf-checkpoint.",
    "serve": """Serve a checkpoint as a run would, without a trainer: engines, behind a router where there are several
or vLLM's, on loopback. They speak OpenAI's routes (/v1/...) and vLLM's (/inference/v1/generate). The address is printed
when it is ready; an engine that dies is started anew; Ctrl-C and SIGTERM end it, with exit code 0. Logs, and nothing
else, are written to --run-dir. --rollout-num-gpus / --rollout-num-gpus-per-engine engines are started; on a CPU these
count processes.""",
}
_SEEDS = {
    "V": "vime's guide",
    "R": "vime's readme",
    "S": "slime's guide",
    "C": "slime",
    "A": "Atropos",
    "T": "TRL",
    "M": "Megatron",
}


def default_text(flag: Flag) -> str:
    """The default as one would type it; empty where there is none."""
    value: Any = flag.default
    if flag.is_switch or value in (None, [], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_help(command: str = "train") -> str:
    """The help of a command: every flag that acts in it, by group, and an example."""
    lines = [f"usage: instep {command} --flag value ...", "", _INTRO[command], ""]
    for group in GROUPS:
        acting = [f for f in group.flags if f.status == "acts" and _acts_in(command, f)]
        if acting:
            lines += [f"{group.title}:", *(line for flag in acting for line in _entry(flag)), ""]
    if command == "serve":
        return "\n".join([*lines, summary("vllm"), summary("vllm-router"), "", SERVE_EXAMPLE])
    count = sum(f.status == "acts" for f in set(passed_through().values()))
    lines += [
        summary("vllm"),
        summary("vllm-router"),
        f"{count} more flags of Megatron are handed to megatron-core as they are. docs/arguments.md lists these and",
        "the flags of slime, vime and Megatron that come later or are refused, with the reason and an alternative.",
        "SIGUSR1 to a run writes stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt.",
        "Names are never abbreviated; --flag=value works, too. Everything that is wrong is reported at once.",
        "",
        EXAMPLE,
    ]
    return "\n".join(lines)


def _acts_in(command: str, flag: Flag) -> bool:
    return flag.name in SERVED if command == "serve" else flag.name != "--port"


def _entry(flag: Flag) -> list[str]:
    left = f"  {flag.name} {flag.type_label}".rstrip()
    default = default_text(flag)
    words = flag.help + (f" (default {default})" if default else "")
    body = textwrap.wrap(words, 70)
    if len(left) <= 46:
        return [f"{left:<48}{body[0]}", *(" " * 48 + line for line in body[1:])]
    return [left, *(" " * 48 + line for line in body)]


def flags_markdown() -> str:
    """docs/arguments.md."""
    own = list(dict.fromkeys(own_flags().values()))
    megatron = list(dict.fromkeys(passed_through().values()))
    count = {s: sum(f.status == s for f in own) for s in ("acts", "later", "refused")}
    lines = [
        "# Flags of `instep train`, `instep sft` and `instep dpo`",
        "",
        "Made by `python -m instep.arguments.help > docs/arguments.md`; do not edit.",
        "",
        f"{len(own)} flags of instep, slime, vime and their neighbours: {count['acts']} act, {count['later']} come "
        f"later, {count['refused']} are refused. Then {len(megatron)} more of Megatron. A flag that does not act is an "
        "error that says why. *From* tells whose flag it is: "
        + ", ".join(_SEEDS.values())
        + "; otherwise instep's own.",
        "",
    ]
    for group in GROUPS:
        acting = [f for f in group.flags if f.status == "acts"]
        others = [f for f in group.flags if f.status != "acts"]
        lines += [f"## {group.title}", ""]
        if acting:
            lines += ["| flag | value | default | what it does | from |", "|---|---|---|---|---|"]
            lines += [_row(_names(f), f.type_label, default_text(f), f.help, _origin(f)) for f in acting] + [""]
        if others:
            lines += ["| flag | status | why | instead | from |", "|---|---|---|---|---|"]
            lines += [_row(_names(f), f.status, f.note, f.instead, _origin(f)) for f in others] + [""]
    lines += [
        "## vLLM and its router",
        "",
        "Their flags are `--vllm-*` and `--router-*`: see [engines_flags.md](engines_flags.md).",
        "",
        "## Megatron: all other flags of core_v0.16.1",
        "",
        "Those that act are handed to the configuration of megatron-core when they are given.",
        "",
        "| flag | value | Megatron's default | status | why | instead |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(_names(f), f.type_label, default_text(f), f.status, f.note, f.instead) for f in megatron]
    return "\n".join(lines) + "\n"


def _names(flag: Flag) -> str:
    return " ".join(f"`{name}`" for name in (flag.name, *flag.aliases))


def _origin(flag: Flag) -> str:
    return ", ".join(_SEEDS[letter] for letter in flag.seeds)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    print(flags_markdown(), end="")
