"""`instep atropos-train`: the command line of Atropos' `example_trainer/grpo.py` as a run of instep.

The flags become the words of `instep train` (`words_of`), with batches of the Atropos API as rollouts. `trainer_run.py`
has the extra output of the run, and its final files.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.engines.flags import TABLES, installed_version
from instep.engines.http import open_without_key
from instep.errors import ConfigError, EngineError
from instep.models.hub import HOW, folder_of
from instep.system.ports import LOOPBACK
from instep_neighbours.atropos.server import key_file
from instep_neighbours.atropos.trainer_flags import COMMAND, WITH_ADAPTER, parser, read

SAME = (
    "--train-backend hf --rollout-backend vllm --num-steps-per-rollout 1 --lr-decay-style constant "
    "--rollout-function-path instep_neighbours.atropos.trainer_run.generate_rollout --disable-rollout-global-dataset "
    "--custom-reward-post-process-path instep_neighbours.atropos.normalized_scores --use-rollout-logprobs"
)
NEIGHBOUR_SECONDS = 10.0  # until each neighbour must answer; the original waits 30 s for the API


def main(words: Sequence[str]) -> int:
    """Train. Returns 0.

    Raises:
        InstepError: a flag is wrong or refused, a neighbour does not answer, or the run fails.
    """
    if "-h" in words or "--help" in words:
        print(parser().format_help(), end="")
        return 0
    from instep.cli import arguments
    from instep_neighbours.atropos.trainer_run import train

    flags = read(words)
    check_readable(flags.model_name)
    for line in reports(flags):
        print(f"[Setup] {line}", flush=True)
    choose_gpus(flags)
    if flags.trainer_rank:
        from instep_neighbours.atropos.joined import join

        join(flags)
        return 0
    _check_neighbours(flags)
    if flags.world_size > 1:
        from instep.cluster.local import joined_ranks
        from instep_neighbours.atropos.joined import meet

        joined_ranks().update(meet(flags))
    loop, given = words_of(flags)
    train(flags, arguments(loop, given))
    return 0


# ---- the command line ------------------------------------------------------------------------------------------------


def words_of(flags: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the command of instep for these flags, and its words."""
    mode, interval = flags.weight_bridge_mode, flags.vllm_restart_interval
    config = _config(flags.model_name)
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    save = Path(flags.save_path)
    out: dict[str, Any] = {
        "--hf-checkpoint": flags.model_name,
        "--run-dir": save,
        "--atropos-url": flags.atropos_url,
        "--num-rollout": flags.training_steps,
        "--n-samples-per-prompt": flags.batch_size,
        "--micro-batch-size": flags.batch_size,
        "--lr": flags.lr,
        "--lr-warmup-iters": flags.warmup_steps,
        "--eps-clip": flags.clip_eps,
        "--precision": "fp32" if flags.dtype == "float32" else "bf16",
        "--device": (flags.device or "auto").partition(":")[0],
        "--actor-num-gpus-per-node": flags.world_size,
        "--rollout-batch-size": flags.gradient_accumulation_steps * flags.world_size,
        "--rollout-max-context-len": min(flags.seq_len, context or flags.seq_len),
        "--optimizer": {"adamw": "adam"}.get(flags.optimizer, flags.optimizer),
        "--weight-sync": {"none": "restart", "shared_vllm": "single-copy"}.get(mode, "lora"),
        "--pause-mode": "wait" if mode == "none" else _pause_mode(),
        "--save-hf": save / ("adapter_step_{step}" if mode in WITH_ADAPTER else "step_{step}"),
        "--save-interval": (flags.checkpoint_interval if mode == "shared_vllm" else interval) or flags.training_steps,
    }
    rest = SAME.split()
    if flags.kl_coef:
        out |= {"--kl-loss-coef": flags.kl_coef, "--kl-loss-type": "low_var_kl"}
        rest += ["--use-kl-loss"]
    if mode in WITH_ADAPTER:
        out |= {"--lora-rank": flags.lora_r, "--lora-alpha": flags.lora_alpha, "--save-hf-as": "adapter"}
        rest += ["--lora-target-modules", *target_modules(flags)]
    elif flags.train_layer_indices:
        layers = "|".join(map(str, flags.train_layer_indices))
        rest += ["--only-train-params-name-list", rf"(^|\.)layers\.({layers})\."]
    if mode in ("shared_vllm", "lora_only"):
        out |= {"--rollout-external-engine-addrs": f"{LOOPBACK}:{flags.vllm_port}"}
        if not os.environ.get("INSTEP_API_KEY") and key_file(flags.vllm_port).is_file():
            out["--api-key-file"] = key_file(flags.vllm_port)
        if mode == "shared_vllm" and flags.vllm_config_path:
            out["--vllm-config-path"] = flags.vllm_config_path
    else:
        out |= {"--engine-port": flags.vllm_port}
        out |= {"--vllm-max-model-len": min(flags.max_model_len, context or flags.max_model_len)}
        rest += ["--no-api-key"]
        rest += _own_engine(flags)
    if flags.resume:
        out |= {"--save": save / "resume", "--load": save / "resume"}
    if flags.use_wandb and flags.wandb_project:
        out |= {"--use-wandb": None, "--wandb-project": flags.wandb_project}
        out |= {"--wandb-group": flags.wandb_group} if flags.wandb_group else {}
    syncs_each = mode == "shared_vllm" or interval == 1
    if not syncs_each:
        out["--update-weights-interval"] = interval
    words = [str(word) for pair in out.items() for word in pair if word is not None]
    return "train" if syncs_each else "train-async", [*words, *rest]


def _pause_mode() -> str:
    """Return `keep`, with which responses continue after a sync as in the original, if vLLM's JSON gives the weight
    version of a token; otherwise responses end before the weights change."""
    from instep.engines.vllm import VllmKind

    return "keep" if VllmKind(installed_version("vllm") or TABLES["vllm"][0]).capabilities.version_spans else "wait"


def _own_engine(flags: argparse.Namespace) -> list[str]:
    """Return the words that place this run's vLLM: on its own GPU, or on the trainer's."""
    from instep.controller.device import device_here

    own = ["--rollout-num-gpus", "1"]
    if (flags.device or device_here()) == "cpu":
        return own
    share = ["--vllm-gpu-memory-utilization", str(flags.gpu_memory_utilization)]
    return share + (["--colocate"] if flags.vllm_gpu is None else own)


def _config(model: str) -> dict[str, Any]:
    try:
        folder = folder_of(model, f"{COMMAND} --model-name", weights=False)
        found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        what = f"{model} is not a folder of a Hugging Face checkpoint: {error}"
        raise ConfigError(what, where=f"{COMMAND} --model-name", remedy=HOW) from error
    return found


def check_readable(model: str) -> None:
    """Raise ConfigError unless `model` is the folder of a checkpoint that the trainer can read."""
    from instep.checkpoints.quantization import quantization_of

    config = _config(model)
    try:
        quantization_of(config, f"{COMMAND} --model-name {model}")
    except ConfigError as error:
        remedy = "name the original checkpoint, also for the server: with `--quantization fp8` it has "
        remedy += "the base in 8 bits under an adapter (--weight-bridge-mode lora_only)"
        raise ConfigError(error.what, where=error.where, remedy=remedy) from error


def target_modules(flags: argparse.Namespace) -> list[str]:
    """Return `--lora-target-modules` in the layers of `--lora-layer-indices`, as names of modules.

    Raises:
        ConfigError: there are no such modules.
    """
    if not flags.lora_layer_indices:
        return list(flags.lora_target_modules)
    from instep.checkpoints.weight_files import weight_files, weight_names

    layers = "|".join(map(str, flags.lora_layer_indices))
    wanted = "|".join(map(re.escape, flags.lora_target_modules))
    pattern = re.compile(rf"(?:^|\.)(layers\.(?:{layers})\.(?:.+\.)?(?:{wanted}))\.weight$")
    folder = folder_of(flags.model_name, f"{COMMAND} --model-name")
    found = [match[1] for name in weight_names(weight_files(Path(folder))) if (match := pattern.search(name))]
    if not found:
        what = f"no {' or '.join(flags.lora_target_modules)} in layers {flags.lora_layer_indices}"
        raise ConfigError(what, where=f"{COMMAND} --lora-layer-indices", remedy="the model's config.json counts layers")
    return found


def choose_gpus(flags: argparse.Namespace) -> None:
    """Make `--device cuda:N` visible to the trainer, and after it the `--vllm-gpu` of its own vLLM."""
    number = (flags.device or "").partition(":")[2]
    if not number and flags.vllm_gpu is None:
        return
    if not number.isdigit() and number:
        what = f"{flags.device!r} is not a device"
        raise ConfigError(what, where=f"{COMMAND} --device", remedy="cpu, cuda or cuda:0")
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if number and visible and int(number) >= len(visible):
        what = f"CUDA_VISIBLE_DEVICES has {len(visible)}"
        raise ConfigError(what, where=f"{COMMAND} --device {flags.device}", remedy="count from 0 among them")
    trainer = [visible[int(number)] if visible else number] if number else visible[: flags.world_size] or ["0"]
    own = flags.weight_bridge_mode in ("none", "lora_restart") and flags.vllm_gpu is not None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*trainer, *([str(flags.vllm_gpu)] if own else [])])


def reports(flags: argparse.Namespace) -> list[str]:
    """Return notes on flags and environment variables with another meaning than the user may expect."""
    env, mode, out = os.environ, flags.weight_bridge_mode, []
    if env.get("VLLM_SKIP_WEIGHT_DAEMON", "1") == "0":
        out.append("VLLM_SKIP_WEIGHT_DAEMON=0: there is no weight daemon here; the flags decide how weights are sent")
    if env.get("VLLM_ENABLE_SHARED_WEIGHTS") == "1" and mode != "shared_vllm":
        out.append(f"VLLM_ENABLE_SHARED_WEIGHTS=1 is for the server; --weight-bridge-mode is {mode}")
    if env.get("NUM_INFERENCE_NODES", "0") not in ("", "0", "-1"):
        out.append(f"NUM_INFERENCE_NODES={env['NUM_INFERENCE_NODES']} is not read: vLLM is on this host")
    if flags.init_method != "env://":
        out.append("--init-method is not read: ranks meet on this host, by --save-path")
    if flags.use_wandb and not flags.wandb_project:
        out.append("Warning: wandb_project not set, disabling wandb.")
    if flags.log_dir is not None:
        out.append(f"--log-dir is a flag of example_trainer/run.py; the logs are in {Path(flags.save_path) / 'logs'}")
    if flags.vllm_config_path and mode != "shared_vllm":
        out.append(f"--vllm-config-path is a flag of shared_vllm; --weight-bridge-mode is {mode}")
    if mode in WITH_ADAPTER and flags.lora_dropout is None:
        out.append("LoRA is trained without dropout (the original's default is 0.05)")
    if mode == "lora_restart":
        out.append("lora_restart: vLLM keeps its CUDA graphs while adapters are swapped, so it is not restarted")
    return out


# ---- the neighbours --------------------------------------------------------------------------------------------------


def _check_neighbours(flags: argparse.Namespace) -> None:
    """Raise EngineError unless the API answers, and the server if the mode has one."""
    port, mode = flags.vllm_port, flags.weight_bridge_mode
    if mode in ("shared_vllm", "lora_only"):
        first, more = "", f" --enable-lora --max-lora-rank {flags.lora_r}"
        if mode == "shared_vllm":
            first, more = "VLLM_ENABLE_SHARED_WEIGHTS=1 ", ""
        if why := _missing(f"http://{LOOPBACK}:{port}/health"):
            raise EngineError(
                f"no vLLM answers on port {port}: {why}",
                where=f"{COMMAND} --weight-bridge-mode {mode} --vllm-port {port}",
                remedy=f"start it first: `{first}instep atropos-serve --model {flags.model_name} --port {port}{more}`",
            )
    if why := _missing(f"{flags.atropos_url.rstrip('/')}/info"):
        raise EngineError(
            f"no Atropos API answered within {NEIGHBOUR_SECONDS:.0f} s: {why}",
            where=f"{COMMAND} --atropos-url {flags.atropos_url}",
            remedy="start it first: run-api (of the wheel atroposlib), or instep env-api",
        )
    print(f"[Trainer] ✓ Atropos API server is reachable at {flags.atropos_url}", flush=True)


def _missing(url: str) -> str:
    """Send GET until the answer is 200. Return "", or why there was none in time. It reports each attempt."""
    left = told = NEIGHBOUR_SECONDS
    deadline = time.monotonic() + left
    while True:
        try:
            with open_without_key(url, timeout=max(0.1, min(2.0, left))) as answer:
                return "" if answer.status == 200 else f"it says {answer.status}"
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last for servers without HTTP
            why = str(error).removeprefix("<urlopen error ").removesuffix(">") or type(error).__name__
        if (left := deadline - time.monotonic()) <= 0:
            return why
        if left <= told:
            print(f"[Trainer] waiting for {url}, {left:.0f} s left ({why})", flush=True)
            told -= 5.0
        time.sleep(min(0.5, left))
