"""The flags of Atropos' `example_trainer/grpo.py`, and what each is in a run of instep."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from instep.errors import ConfigError

COMMAND = "instep atropos-train"
MODES = ("none", "shared_vllm", "lora_only", "lora_restart")
WITH_ADAPTER = ("lora_only", "lora_restart")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where=COMMAND, remedy=f"`{COMMAND} --help` lists what it takes")


def layer_indices(text: str) -> list[int]:
    """The numbers of `0-3,28-31`, each once, in order. Raises ArgumentTypeError."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(first) > int(last)):
            raise argparse.ArgumentTypeError(f"{part!r} is no layer and no range of layers; write 0-3,28-31")
        found.update(range(int(first), int(last if dash else first) + 1))
    if not found:
        raise argparse.ArgumentTypeError("names no layer; write 0-3,28-31")
    return sorted(found)


def positive(text: str) -> int:
    """An integer above 0. Raises ArgumentTypeError."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no integer above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Flags and defaults are those of the wheel atroposlib 0.4.0, and of the README beside it."""
    made = _Parser(
        prog=COMMAND,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The trainer of Atropos' examples (example_trainer/grpo.py). docs/neighbours/atropos_trainer.md "
        "says what each mode does.",
        epilog="Environment: LOGDIR is where vllm_bridge_config.json is looked for, INSTEP_API_KEY a server's key; "
        "CUDA_VISIBLE_DEVICES are the GPUs. VLLM_ENABLE_SHARED_WEIGHTS and NUM_INFERENCE_NODES are the server's.",
    )

    def group(title: str) -> Any:
        return made.add_argument_group(title).add_argument

    add = group("model and mode")
    named = "Hugging Face checkpoint: a folder, or ORG/NAME of the hub"
    add("--model", "--model-name", required=True, dest="model_name", metavar="MODEL", help=named)
    add("--weight-bridge-mode", choices=MODES, default="none", help="how weights reach vLLM (none)")
    add("--single-copy", action="store_true", help="the same as --weight-bridge-mode shared_vllm")
    add("--vllm-config-path", help="vllm_bridge_config.json; default: in $LOGDIR, here, or in /tmp/atropos_bridge")
    add("--train-layer-indices", type=layer_indices, help="layers that are trained, as 0-3,28-31; default: all")
    add = group("training")
    add("--training-steps", type=positive, default=10, help="optimizer steps of the whole run (10)")
    add("--batch-size", type=positive, default=2, help="sequences of a micro-batch (2)")
    add("--gradient-accumulation-steps", type=positive, default=32, help="micro-batches of a step (32)")
    add("--seq-len", type=positive, default=2048, help="most tokens of a sequence, as environments are told (2048)")
    add("--lr", type=float, default=1e-5, help="learning rate (1e-5)")
    add("--warmup-steps", type=int, default=0, help="steps of linear warm-up (0)")
    add("--optimizer", choices=("adamw", "adamw_8bit", "adafactor"), default="adamw_8bit", help="(adamw_8bit)")
    add("--adafactor-scale-parameter", action="store_true", help="of adafactor, which is refused")
    add("--adafactor-relative-step", action="store_true", help="of adafactor, which is refused")
    add("--clip-eps", type=float, default=0.2, help="the ratio is clipped to [1 - eps, 1 + eps] (0.2)")
    add("--kl-coef", type=float, default=0.0, help="weight of the KL to the first weights in the loss (0)")
    add("--device", help="cpu, cuda or cuda:N; default: cuda where there is a GPU")
    add("--save-path", default="trained_model_checkpoints", help="step_N/ or adapter_step_N/, and files of the run")
    add("--checkpoint-interval", type=int, default=3, help="shared_vllm saves every N steps; 0: at the end (3)")
    add("--resume", action="store_true", help="keep in SAVE_PATH/resume what the same command needs to go on")
    add = group("LoRA (lora_only, lora_restart)")
    add("--lora-r", type=positive, default=16, help="rank (16)")
    add("--lora-alpha", type=positive, default=32, help="the adapter counts alpha / r (32)")
    add("--lora-dropout", type=float, help="0 only")
    add("--lora-target-modules", nargs="+", default=["q_proj", "v_proj"], help="(q_proj v_proj)")
    add("--lora-layer-indices", type=layer_indices, help="layers with an adapter, as 0-3,28-31; default: all")
    add = group("vLLM")
    add("--vllm-port", type=positive, default=9001, help="of the server that runs, or that the run starts (9001)")
    add("--vllm-gpu", type=int, help="GPU of a vLLM that the run starts; default: the trainer's")
    add("--gpu-memory-utilization", "--vllm-gpu-memory-utilization", type=float, default=0.45, help="of it (0.45)")
    add("--max-model-len", type=positive, default=4096, help="most tokens of its requests (4096)")
    add("--dtype", choices=("bfloat16", "float16", "float32", "auto"), default="bfloat16", help="of weights (bfloat16)")
    add("--vllm-restart-interval", type=positive, default=3, help="steps between two updates of vLLM (3)")
    add = group("Atropos and logging")
    add("--atropos-url", default="http://localhost:8000", help="the API (http://localhost:8000)")
    add("--use-wandb", action="store_true", help="log to Weights & Biases; needs --wandb-project")
    add("--wandb-project")
    add("--wandb-group")
    add("--benchmark", action="store_true", help="print the seconds of each step, and a summary")
    add("--debug-loading", action="store_true", help="print each weight that is attached (shared_vllm)")
    add("--log-dir", help="of example_trainer/run.py alone; logs are in SAVE_PATH/logs")
    add = group("several trainers")
    add("--trainer-rank", type=int, default=0, help="(0)")
    add("--world-size", type=positive, default=1, help="trainer ranks, which reduce gradients (1)")
    add("--init-method", default="env://", help="(env://)")
    add("--num-inference-nodes", type=int, default=0, help="0: vLLM is on this host")
    return made


def read(words: Sequence[str]) -> argparse.Namespace:
    """The flags with their defaults, without those that are refused.

    Raises:
        ConfigError: a flag is unknown, or refused.
    """
    made = parser()
    flags, unknown = made.parse_known_args([_dashes(word) for word in words])
    if unknown:
        name = unknown[0].partition("=")[0]
        like = difflib.get_close_matches(name, made._option_string_actions, n=1)
        remedy = f"did you mean {like[0]}?" if like else f"`{COMMAND} --help` lists what it takes"
        raise ConfigError(f"there is no {name}", where=COMMAND, remedy=remedy)
    for name, wrong, why, instead in _refusals(flags):
        if wrong:
            raise ConfigError(why, where=f"{COMMAND} {name}", remedy=instead)
    if flags.single_copy:
        flags.weight_bridge_mode = "shared_vllm"
    return flags


def _dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _refusals(flags: argparse.Namespace) -> list[tuple[str, bool, str, str]]:
    mode, rank, size = flags.weight_bridge_mode, flags.trainer_rank, flags.world_size
    adafactor = flags.adafactor_scale_parameter or flags.adafactor_relative_step
    return [
        (
            "--single-copy",
            flags.single_copy and mode in WITH_ADAPTER,
            f"the server shares its weights or takes adapters, and --weight-bridge-mode is {mode}",
            "leave one of the two out",
        ),
        (
            "--optimizer adafactor",
            flags.optimizer == "adafactor" or adafactor,
            "there is no Adafactor here, whose steps are of another size",
            "--optimizer adamw_8bit needs 2 bytes a parameter for its moments",
        ),
        (
            "--dtype float16",
            flags.dtype == "float16",
            "gradients in float16 need a loss scale, which the trainer has not",
            "--dtype bfloat16, or float32",
        ),
        (
            f"--lora-dropout {flags.lora_dropout}",
            bool(flags.lora_dropout),
            "the engine, whose distribution is trained, has no dropout",
            "leave it out; without the flag there is none here (the original's default is 0.05)",
        ),
        (
            f"--num-inference-nodes {flags.num_inference_nodes}",
            flags.num_inference_nodes > 0,
            "the trainer reaches one vLLM, on this host",
            "0; instep train --rollout-external-engine-addrs reaches several",
        ),
        (
            "--train-layer-indices",
            bool(flags.train_layer_indices) and mode in WITH_ADAPTER,
            "an adapter is all that is trained there",
            "--lora-layer-indices",
        ),
        (
            f"--trainer-rank {rank} --world-size {size}",
            not 0 <= rank < size,
            "ranks count from 0 to the world's size less 1",
            "give each trainer one of them",
        ),
        ("--checkpoint-interval", flags.checkpoint_interval < 0, "is below 0", "0 saves at the end alone"),
        ("--warmup-steps", flags.warmup_steps < 0, "is below 0", "0 for none"),
    ]
