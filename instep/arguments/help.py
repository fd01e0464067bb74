"""`instep train --help`, made from the records of the flags."""

from __future__ import annotations

import textwrap
from typing import Any

from instep.arguments.all_flags import groups, passed_through
from instep.arguments.engine_help import summary
from instep.arguments.flag import Flag
from instep.arguments.suggest import acts_in

_SERVE_EXAMPLE = """\
Example: two engines behind the router, then a request from another terminal
  instep serve --hf-checkpoint models/tiny --rollout-num-gpus 2 --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "models/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
Any OpenAI client works: docs/engines.md, "OpenAI clients".
"""
_TRAIN_EXAMPLE = """\
Example: GRPO on a CPU, with a built-in reward
  instep train --hf-checkpoint models/tiny --prompt-data train.jsonl --input-key prompt --label-key label \\
    --apply-chat-template --rm-type math --num-rollout 50 --rollout-batch-size 16 --n-samples-per-prompt 8 \\
    --rollout-max-response-len 128 --actor-num-gpus-per-node 1 --lr 1e-4 \\
    --eval-prompt-data held-out eval.jsonl --eval-interval 10 --save runs/mine/checkpoints --run-dir runs/mine
"""
_ASYNC_EXAMPLE = """\
Example: the flags of `instep train`; --update-weights-interval 2 syncs after every second rollout
  instep train-async --hf-checkpoint models/tiny --prompt-data train.jsonl --input-key prompt --label-key label \\
    --apply-chat-template --rm-type math --num-rollout 50 --rollout-batch-size 16 --n-samples-per-prompt 8 \\
    --rollout-max-response-len 128 --actor-num-gpus-per-node 1 --lr 1e-4
"""
_SFT_EXAMPLE = """\
Example: one conversation a line, {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}
  instep sft --hf-checkpoint models/tiny --prompt-data sft.jsonl --input-key messages --num-epoch 3 \\
    --rollout-batch-size 256 --global-batch-size 32 --actor-num-gpus-per-node 1 --lr 1e-5 --save-hf runs/sft/hf
"""
_DPO_EXAMPLE = """\
Example: one pair a line, {"prompt": "...", "chosen": "...", "rejected": "..."}
  instep dpo --hf-checkpoint models/tiny --prompt-data pairs.jsonl --input-key prompt --num-epoch 1 \\
    --rollout-batch-size 64 --actor-num-gpus-per-node 1 --lr 1e-6 --dpo-beta 0.1 --save-hf runs/dpo/hf
"""
_EXAMPLES = {
    "train": _TRAIN_EXAMPLE,
    "train-async": _ASYNC_EXAMPLE,
    "sft": _SFT_EXAMPLE,
    "dpo": _DPO_EXAMPLE,
    "serve": _SERVE_EXAMPLE,
}

_INTRO = {
    "train": "Train a language model with reinforcement learning: rollout, reward, step, weight sync, again.",
    "train-async": "The same with rollouts beside the training: while a step is trained, the next rollout is generated "
    "with the weights of before (docs/async.md).",
    "sft": "Supervised fine-tuning through the same trainer; needs no engine. --rollout-batch-size counts samples.",
    "dpo": "Direct preference optimization of pairs (prompt, chosen, rejected) through the same trainer; needs no "
    "engine. Batch sizes count pairs; the reference is --ref-load, by default --hf-checkpoint.",
    "serve": "Serve a checkpoint as a run would, without a trainer: engines, behind a router where there are several "
    "or vLLM's, on loopback. They speak OpenAI's routes (/v1/...) and vLLM's (/inference/v1/generate). The address "
    "is printed when it is ready; an engine that dies is started anew; Ctrl-C and SIGTERM end it, with exit code "
    "0. Logs, and nothing else, are written to --run-dir. --rollout-num-gpus / --rollout-num-gpus-per-engine "
    "engines are started; on a CPU these count processes.",
}

PROFILE_HELP = """\
usage: instep profile --flag value ...

Where does a step's time go? Takes the flags of `instep train`, runs three of its steps (generate, train, sync) and
records the third, which is warm: the processes, the path of the weights and all settings are those of the run. What it
prints at the end is a table of the phases and their parts, with the share of each, its floor (the least that the
arithmetic, the memory or the link allow) and how many floors it takes; and the longest times in which nobody worked.

It writes into --run-dir with "-profile" added (default runs/train-profile), and so touches no other run:
  profile/step-2.trace.json.gz   the timeline; drag it into https://ui.perfetto.dev (nothing leaves the browser)
  profile/step-2.txt             the table
A row of the timeline for each process: the controller (phases, parts of the sync), each rank (its calls; rank 0 with
operators and CUDA kernels, or those of --profile-ranks), each engine (steps and requests; vLLM's with its own kernels),
and every sample with its turns and its reward.

Left out are --save, --save-hf, --critic-save, evaluations and W&B; of --load it takes the weights alone. To record
steps of a run itself, with all of that, give `instep train` --profile, --profile-step-start and --profile-step-end.
Recording slows the step by some percent; docs/performance.md says how to read it.

Example: the flags of a run of yours
  instep profile --hf-checkpoint models/tiny --prompt-data train.jsonl --input-key prompt --label-key label \\
    --apply-chat-template --rm-type math --num-rollout 50 --rollout-batch-size 16 --n-samples-per-prompt 8 \\
    --rollout-max-response-len 128 --actor-num-gpus-per-node 1 --lr 1e-4
"""


def default_text(flag: Flag) -> str:
    """The default as a user would type it; empty where there is none."""
    value: Any = flag.default
    if flag.is_switch or value in (None, [], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_help(command: str = "train") -> str:
    """The help text of a command: every flag that acts in it, by group, and an example."""
    lines = [f"usage: instep {command} --flag value ...", "", textwrap.fill(_INTRO[command], 118), ""]
    for group in groups():
        acting = [f for f in group.flags if acts_in(command, f)]
        if acting:
            lines += [f"{group.title}:", *(line for flag in acting for line in _entry(flag)), ""]
    if command in ("train", "train-async", "serve"):
        lines += [summary("vllm"), summary("vllm-router")]
    if command == "serve":
        return "\n".join([*lines, "", _EXAMPLES[command]])
    count = sum(f.status == "acts" for f in set(passed_through().values()))
    lines += [
        f"{count} more flags of Megatron are handed to megatron-core as they are. docs/arguments.md lists these and",
        "the flags of slime, vime and Megatron that come later or are refused, with the reason and an alternative.",
        "SIGUSR1 to a run writes stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt.",
        "Names are never abbreviated; --flag=value works, too. Everything that is wrong is reported at once.",
        "",
        _EXAMPLES[command],
    ]
    return "\n".join(lines)


def _entry(flag: Flag) -> list[str]:
    label = f"  {flag.name} {flag.type_label}".rstrip().replace("|", "| ")  # a line may end after each alternative
    lines = textwrap.wrap(label, 120, subsequent_indent=" " * (3 + len(flag.name)), break_on_hyphens=False)
    *above, left = (line.replace("| ", "|") for line in lines)
    default = default_text(flag)
    words = flag.help + (f" (default {default})" if default else "")
    body = textwrap.wrap(words, 70)
    if len(left) <= 46:
        return [*above, f"{left:<48}{body[0]}", *(" " * 48 + line for line in body[1:])]
    return [*above, left, *(" " * 48 + line for line in body)]
