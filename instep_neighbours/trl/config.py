"""`instep.train` and `instep.Run` with TRL's names: `reward_funcs`, datasets and fields of `GRPOConfig`.

`as_flags` converts them to instep's flags; `fields.py` has the meaning of each field here. Missing fields have
GRPOConfig's defaults, so a call has the same meaning as in `GRPOTrainer`. One of instep's flags overrides such a
default. It is an error if the user also gives the field with the same meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep_neighbours.trl import rewards
from instep_neighbours.trl.fields import KNOWN, Config, error, evaluations, rows_of
from instep_neighbours.trl.sizes import Sizes, sizes_of

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}
_OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adam") | dict.fromkeys(
    ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"
)
# Fields whose first flag gets their value unchanged: always, if it is not empty, and if it is given.
_ALWAYS = "max_completion_length temperature top_p seed learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon"
_NOT_EMPTY = "shuffle_dataset chat_template_kwargs full_determinism trust_remote_code vllm_enable_sleep_mode"
_GIVEN = (
    "output_dir num_completions_to_print vllm_tensor_parallel_size vllm_max_model_length vllm_gpu_memory_utilization "
    "vllm_model_impl"
)


class Translation(NamedTuple):
    """A call with TRL's names, in instep's terms.

    Attributes:
        flags: by attribute; functions replace the dotted paths of hooks.
        rows: the rows to train on; None without `train_dataset`. A row has `prompt`, `label` if the dataset has one,
            and its other columns under `metadata`.
        evaluations: the rows of each evaluation, by name.
        notes: information for the user.
    """

    flags: dict[str, Any]
    rows: list[dict[str, Any]] | None
    evaluations: dict[str, list[dict[str, Any]]]
    notes: list[str]


def as_flags(
    command: str, args: Any, reward_funcs: Any, train_dataset: Any, eval_dataset: Any, keywords: Mapping[str, Any]
) -> Translation:
    """Translate the arguments of `GRPOTrainer`.

    Args:
        args: None, a `GRPOConfig`, or a dict of its fields.
        keywords: fields, and flags of instep.

    Raises:
        ConfigError: a field is not supported, or fields contradict each other or flags of instep.
    """
    config = Config(args, keywords)
    rows = None if train_dataset is None else rows_of(train_dataset, "train_dataset")
    sets = evaluations(eval_dataset)
    if rows and not isinstance(rows[0]["prompt"], str):
        config.put("apply_chat_template", True)
    _copied(config)
    _rewards(config, reward_funcs)
    _model(config)
    sizes = sizes_of(config, None if rows is None else len(rows))
    _loss(config, sizes)
    _sampling(config)
    _optimizer(config, sizes)
    _saving(config, sizes, Path(config.flags.get("run_dir") or f"runs/{command}"))
    _evaluation(config, sizes, bool(sets))
    return Translation(config.flags, rows, sets, config.notes)


def _copied(config: Config) -> None:
    names = [*_ALWAYS.split(), *(name for name in _NOT_EMPTY.split() if config[name])]
    for name in [*names, *(name for name in _GIVEN.split() if config[name] is not None and name in config.given)]:
        config.put(KNOWN[name].here.split()[0].removeprefix("--").replace("-", "_"), config[name], name)


def _model(config: Config) -> None:
    """Set device, precision, memory and engine."""
    if config["use_cpu"]:
        config.put("device", "cpu", "use_cpu")
    if config.flags.get("device") in (None, "auto"):
        from instep.controller.device import device_here

        config.flags["device"] = device_here()
    gpu = config.flags["device"] != "cpu"
    if "bf16" in config.given:
        config.put("precision", "bf16" if config["bf16"] else "fp32", "bf16")
    if "gradient_checkpointing" in config.given and config["gradient_checkpointing"]:
        config.put("recompute_granularity", "full", "gradient_checkpointing")
        if config.flags.get("train_backend") in (None, "megatron"):
            config.put("recompute_method", "uniform")
            config.put("recompute_num_layers", 1)
    if config["use_vllm"]:
        config.put("rollout_backend", "vllm", "use_vllm")
    config.one_of("vllm_mode", "colocate", "server")
    if config["vllm_mode"] == "colocate" and gpu:
        config.put("colocate", True, "vllm_mode")


def _rewards(config: Config, reward_funcs: Any) -> None:
    names = ("reward_weights", "multi_objective_aggregation")
    if reward_funcs is None:
        if wrong := [name for name in names if name in config.given]:
            raise error("it has no effect without reward_funcs", wrong[0], "give reward_funcs")
    else:
        config.flags |= rewards.flags_of(reward_funcs, config["reward_weights"])
    scale, together = config["scale_rewards"], config["multi_objective_aggregation"]
    scale = {True: "group", False: "none"}.get(scale, scale)
    config.one_of("multi_objective_aggregation", "sum_then_normalize", "normalize_then_sum")
    config.one_of("scale_rewards", "group", "batch", "none", True, False)
    if together == "normalize_then_sum":
        hook = rewards.normalize_then_sum(reward_funcs, config["reward_weights"])
        config.put("custom_reward_post_process_path", hook, "multi_objective_aggregation")
    elif scale == "batch":
        config.put("custom_reward_post_process_path", rewards.scaled_by_batch, "scale_rewards")
    elif scale == "none":
        config.put("disable_grpo_std_normalization", True, "scale_rewards")
    if config["mask_truncated_completions"]:
        config.put("rollout_sample_filter_path", rewards.remove_truncated, "mask_truncated_completions")


def _loss(config: Config, sizes: Sizes) -> None:
    """Set the form of the loss, its mean, the KL and other terms."""
    kind = config["loss_type"]
    config.one_of("loss_type", "grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo")
    config.one_of("importance_sampling_level", "token", "sequence")
    of_sequences = config["importance_sampling_level"] == "sequence"
    if of_sequences and kind in ("cispo", "sapo"):
        raise error(f"{kind} has ratios of tokens here", "importance_sampling_level", "use grpo, dapo or dr_grpo")
    if kind in ("dapo", "cispo"):
        config.put("calculate_per_token_loss", True, "loss_type")
    elif kind in ("dr_grpo", "luspo"):
        constant = config["max_completion_length"] if kind == "dr_grpo" else 1
        config.put("constant_loss_length", constant, "loss_type")
    if kind in ("cispo", "sapo") or of_sequences:
        config.put("advantage_estimator", "gspo" if of_sequences else kind, "loss_type", "importance_sampling_level")
    if of_sequences:
        config.put("gspo_gradient", "sequence", "importance_sampling_level")
    _clip(config, kind, of_sequences)
    if config["beta"]:
        _kl(config, sizes, of_sequences)
    elif config["sync_ref_model"]:
        raise error("there is no reference without beta", "sync_ref_model", "give beta, or remove it")
    if config["entropy_coef"]:
        if kind in ("dr_grpo", "luspo"):
            what = f"the constant of {kind} would scale the bonus, which is a mean over tokens in TRL"
            raise error(what, "entropy_coef", "remove it, or use another loss_type")
        config.put("entropy_coef", config["entropy_coef"])
    if config["off_policy_mask_threshold"] is not None:
        config.put("use_opsm", True, "off_policy_mask_threshold")
        config.put("opsm_delta", config["off_policy_mask_threshold"], "off_policy_mask_threshold")
    if config["use_vllm"] and config["vllm_importance_sampling_correction"]:
        _correction(config)


def _clip(config: Config, kind: str, of_sequences: bool) -> None:
    low, high, delta = config["epsilon"], config["epsilon_high"], config["delta"]
    if kind == "sapo":
        config.put("sapo_tau_pos", config["sapo_temperature_pos"], "sapo_temperature_pos")
        config.put("sapo_tau_neg", config["sapo_temperature_neg"], "sapo_temperature_neg")
    elif kind == "cispo":
        if high is None or high <= 1:
            what = "with cispo it is the bound of the ratio itself, which is above 1"
            raise error(what, "epsilon_high", "give one, such as 5")
        config.put("eps_clip", 1)  # no lower bound
        config.put("eps_clip_high", high - 1, "epsilon_high")
    elif of_sequences or "epsilon" in config.given or high is not None:
        config.put("eps_clip", low, "epsilon")
        config.put("eps_clip_high", low if high is None else high, "epsilon_high")
    without = {"sapo": ("epsilon", "epsilon_high", "delta"), "cispo": ("epsilon", "delta")}.get(kind, ())
    if wrong := [name for name in without if name in config.given]:
        raise error(f"it has no effect with loss_type {kind}", wrong[0], "remove it")
    if delta is not None:
        if delta <= 1 + (low if high is None else high):
            what = "below the upper clip bound, TRL's two-sided clip differs from the dual clip here"
            raise error(what, "delta", "give more than 1 + epsilon_high")
        config.put("eps_clip_c", delta, "delta")


def _kl(config: Config, sizes: Sizes, of_sequences: bool) -> None:
    config.put("use_kl_loss", True, "beta")
    config.put("kl_loss_coef", config["beta"], "beta")
    config.put("kl_loss_type", "k3", "beta")
    if config["use_bias_correction_kl"]:
        if of_sequences:
            what = "the KL is weighted with token ratios here, and with the sequence ratio in TRL"
            raise error(what, "use_bias_correction_kl", "give False, or importance_sampling_level token")
        config.put("use_unbiased_kl", True, "use_bias_correction_kl")
    if config["sync_ref_model"]:
        if config["ref_model_mixup_alpha"] != 1:
            raise error("the reference is copied, not mixed", "ref_model_mixup_alpha", "give 1")
        interval = sizes.in_rollouts(config["ref_model_sync_steps"], "ref_model_sync_steps")
        config.put("ref_update_interval", interval, "sync_ref_model", "ref_model_sync_steps")


def _correction(config: Config) -> None:
    """Set TRL's truncated or masked importance sampling between trainer and engine."""
    name = "vllm_importance_sampling_"
    mode = config[f"{name}mode"]
    high, low = config[f"{name}cap"] or config[f"{name}clip_max"], config[f"{name}clip_min"]
    config.one_of(f"{name}mode", "sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    level, _, how = mode.partition("_")
    if how == "truncate" and low is None and high is None:
        raise error("a truncation needs a bound", f"{name}mode", f"give {name}clip_max")
    config.put("use_tis", True, f"{name}correction")
    config.put("tis_level", level, f"{name}mode")
    config.put("tis_mode", "mask" if how == "mask" else "truncate" if low is None else "clip", f"{name}mode")
    config.put("tis_clip", 1e6 if high is None else high, f"{name}clip_max", f"{name}cap")
    if low is not None:
        config.put("tis_clip_low", low, f"{name}clip_min")


def _sampling(config: Config) -> None:
    data_seed = config["data_seed"]
    config.put("rollout_top_k", config["top_k"] or -1, "top_k")
    config.put("rollout_seed", config["seed"] if data_seed is None else data_seed, "data_seed")


def _optimizer(config: Config, sizes: Sizes) -> None:
    kind, more, warmup = config["lr_scheduler_type"], config["lr_scheduler_kwargs"] or {}, config["warmup_steps"]
    config.one_of("lr_scheduler_type", *_SCHEDULES)
    config.one_of("optim", *_OPTIMIZERS)
    warmup = 0 if kind == "constant" else sizes.whole(warmup, "warmup_steps")
    if kind == "inverse_sqrt" and not warmup:
        raise error("without a warm-up its scale differs here", "lr_scheduler_type", "give warmup_steps")
    min_lr = more.get("min_lr", more.get("min_lr_rate", 0) * config["learning_rate"])
    if set(more) - {"min_lr", "min_lr_rate"} or (more and kind != "cosine_with_min_lr"):
        raise error(f"{kind} has no {', '.join(more)} here", "lr_scheduler_kwargs", "remove it")
    config.put("lr_decay_style", _SCHEDULES[kind], "lr_scheduler_type")
    config.put("lr_warmup_iters", warmup, "warmup_steps")
    if min_lr:
        config.put("min_lr", min_lr, "lr_scheduler_kwargs")
    config.put("optimizer", _OPTIMIZERS[config["optim"]], "optim")
    config.put("clip_grad", config["max_grad_norm"] or 0, "max_grad_norm")


def _saving(config: Config, sizes: Sizes, folder: Path) -> None:
    """Set what the run writes below its folder, as in `GRPOTrainer`: checkpoints and the model; and its loggers."""
    config.one_of("save_strategy", "no", "steps", "epoch")
    if config["save_strategy"] != "no":
        config.put("save_hf", folder / "hf", "save_strategy")
        if not config["save_only_model"]:
            config.put("save", folder / "checkpoints", "save_strategy")
        if config["save_strategy"] == "steps" and "save_steps" not in config.given:
            interval = max(1, config["save_steps"] // sizes.steps_per_rollout)
        else:
            interval = _interval(config, sizes, "save_strategy", "save_steps")
        config.put("save_interval", interval, "save_steps", "save_strategy")
    if resume := config["resume_from_checkpoint"]:
        config.put("load", folder / "checkpoints" if resume is True else resume, "resume_from_checkpoint")
    report = config["report_to"]
    for name in [report] if isinstance(report, str) else report or ():
        if name not in ("none", "wandb", "tensorboard", "trackio"):
            remedy = "give wandb, tensorboard, trackio or none"
            raise error(f"the logger {name!r} is not supported", "report_to", remedy)
        if name != "none":
            config.put(f"use_{name}", True)
    for logger, run_name in (("wandb", "wandb_group"), ("trackio", "trackio_run_name")):
        for name, flag in (("run_name", run_name), ("project", f"{logger}_project")):
            if name in config.given and config.flags.get(f"use_{logger}"):
                config.put(flag, config[name], name)


def _evaluation(config: Config, sizes: Sizes, has_sets: bool) -> None:
    """Set evaluations: TRL evaluates if eval_strategy requests it."""
    config.one_of("eval_strategy", "no", "steps", "epoch")
    if config["eval_strategy"] == "no":
        if wrong := [name for name in ("eval_steps", "eval_on_start", "num_generations_eval") if name in config.given]:
            raise error("there is no evaluation", wrong[0], "give eval_strategy='steps' and eval_dataset")
        return
    if not has_sets:
        raise error("there is nothing to evaluate", "eval_strategy", "give eval_dataset")
    name = "logging_steps" if config["eval_steps"] is None else "eval_steps"
    config.put("eval_interval", _interval(config, sizes, "eval_strategy", name), "eval_steps", "eval_strategy")
    group = config["num_generations_eval"] or config["num_generations"]
    config.put("n_samples_per_eval_prompt", group, "num_generations_eval")
    if not config["eval_on_start"]:
        config.put("skip_eval_before_train", True, "eval_on_start")


def _interval(config: Config, sizes: Sizes, strategy: str, steps: str) -> int:
    if config[strategy] == "steps":
        return sizes.in_rollouts(config[steps], steps)
    if sizes.rollouts_per_epoch is None:
        raise error("the length of an epoch is unknown", strategy, "give train_dataset, or use steps")
    return sizes.rollouts_per_epoch
