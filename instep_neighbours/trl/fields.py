"""Every field of TRL 1.16's `GRPOConfig`, those of transformers' `TrainingArguments` too, and what it is here.

`config.py` acts on them, docs/neighbours/trl_config.md shows them, and tests/neighbours compares names and defaults
with the wheel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["acts", "changes nothing", "not here"]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        default: TRL's.
        kind: acts; changes nothing here, whatever its value; or not here: any value but the default is an error.
        here: instep's flags, as one would type them.
        note: how it acts, why it changes nothing, or why it is not here and what there is instead.
    """

    name: str
    default: Any
    kind: Kind
    here: str = ""
    note: str = ""


def _acts(name: str, default: Any, here: str, note: str = "") -> Field:
    return Field(name, default, "acts", here, note)


def _idle(note: str, **defaults: Any) -> Iterator[Field]:
    return (Field(name, default, "changes nothing", "", note) for name, default in defaults.items())


def _not_here(note: str, **defaults: Any) -> Iterator[Field]:
    return (Field(name, default, "not here", "", note) for name, default in defaults.items())


FIELDS: tuple[Field, ...] = (
    # ---- sizes and length of the run
    _acts("num_generations", 8, "--n-samples-per-prompt"),
    _acts(
        "per_device_train_batch_size",
        8,
        "--micro-batch-size --global-batch-size --rollout-batch-size",
        "completions. On GPUs the plan chooses the micro-batch unless this is given",
    ),
    _acts(
        "gradient_accumulation_steps",
        1,
        "--global-batch-size",
        "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks",
    ),
    _acts(
        "generation_batch_size",
        None,
        "--rollout-batch-size",
        "completions, so divided by num_generations; or steps_per_generation",
    ),
    _acts(
        "steps_per_generation",
        None,
        "--rollout-batch-size",
        "a multiple of gradient_accumulation_steps: a rollout holds whole optimizer steps",
    ),
    _acts("max_steps", -1, "--num-rollout", "optimizer steps; a multiple of those of a rollout"),
    _acts(
        "num_train_epochs",
        3.0,
        "--num-rollout",
        "with max_steps -1: epochs x prompts // prompts of a rollout. An epoch's last prompts, too few for a rollout, "
        "begin the next rollout here; TRL leaves them out",
    ),
    _acts("max_completion_length", 512, "--rollout-max-response-len"),
    _acts("shuffle_dataset", True, "--rollout-shuffle"),
    _acts("seed", 42, "--seed --rollout-seed"),
    _acts("data_seed", None, "--rollout-seed"),
    _acts("full_determinism", False, "--deterministic-mode"),
    # ---- sampling
    _acts("temperature", 1.0, "--rollout-temperature"),
    _acts("top_p", 1.0, "--rollout-top-p"),
    _acts("top_k", 0, "--rollout-top-k", "0 is -1 here: off"),
    _acts("chat_template_kwargs", None, "--apply-chat-template-kwargs"),
    *_not_here(
        "the trainer's log-probs are those of the distribution without it; a generate function of yours "
        "(custom_generate_function_path) may sample as it likes",
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs=None,
        vllm_structured_outputs_regex=None,
    ),
    # ---- rewards and advantages
    _acts("reward_weights", None, "--custom-rm-path", "of reward_funcs: one number each"),
    _acts(
        "scale_rewards",
        "group",
        "--disable-grpo-std-normalization --custom-reward-post-process-path",
        "False or none: no division; batch: by the std of the rollout. 1e-6 is added to a group's std, TRL: 1e-4",
    ),
    _acts("multi_objective_aggregation", "sum_then_normalize", "--custom-reward-post-process-path"),
    _acts("mask_truncated_completions", False, "--rollout-sample-filter-path", "they are removed from the loss"),
    # ---- the loss
    _acts(
        "loss_type",
        "dapo",
        "--calculate-per-token-loss --constant-loss-length --advantage-estimator",
        "dapo: tokens of an optimizer step are counted, TRL counts those of the rollout and divides by its steps; "
        "grpo; dr_grpo: max_completion_length is the constant; luspo: a constant of 1; cispo; sapo. Not here: bnpo, "
        "whose mean depends on the micro-batches (dapo is the same where there is one), and vespo",
    ),
    _acts(
        "epsilon",
        0.2,
        "--eps-clip",
        "without effect with cispo and sapo, in TRL as here, where giving it is an error",
    ),
    _acts("epsilon_high", None, "--eps-clip-high", "with cispo the bound of the ratio itself: 5 is 4 here"),
    _acts("delta", None, "--eps-clip-c", "above 1 + epsilon_high, where both are the same"),
    _acts("sapo_temperature_neg", 1.05, "--sapo-tau-neg"),
    _acts("sapo_temperature_pos", 1.0, "--sapo-tau-pos"),
    _acts(
        "importance_sampling_level",
        "token",
        "--advantage-estimator gspo --gspo-gradient sequence",
        "sequence, with loss_type grpo, dapo, dr_grpo or luspo",
    ),
    _acts("beta", 0.0, "--use-kl-loss --kl-loss-coef --kl-loss-type k3", "0: no reference, no KL"),
    _acts("use_bias_correction_kl", True, "--use-unbiased-kl", "with beta; not with ratios of sequences"),
    _acts("sync_ref_model", False, "--ref-update-interval", "with beta"),
    _acts("ref_model_mixup_alpha", 0.6, "--ref-update-interval", "1 alone: a copy, no mix"),
    _acts("ref_model_sync_steps", 512, "--ref-update-interval", "in rollouts there"),
    _acts(
        "entropy_coef",
        0.0,
        "--entropy-coef",
        "with loss_type dapo or cispo the mean over tokens, as TRL's; with grpo and sapo that of samples' means; "
        "with dr_grpo and luspo it is refused, whose constants would scale it",
    ),
    _acts("off_policy_mask_threshold", None, "--use-opsm --opsm-delta", "against the old log-probs, not the engine's"),
    *_not_here("each sample is trained on once; steps_per_generation gives a rollout several steps", num_iterations=1),
    *_not_here(
        "no loss of instep has it; a loss of yours (custom_loss_function_path) may",
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
    ),
    *_idle(
        "of a loss or a controller that is not here",
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        entropy_coef_min=0.0,
        entropy_coef_max=1.0,
        entropy_coef_delta=0.005,
        entropy_target=0.2,
    ),
    *_not_here(
        "moe_aux_loss_coeff weighs Megatron's balance loss, which has another scale than transformers'",
        router_aux_loss_coef=None,
    ),
    # ---- engine, and what corrects its log-probs
    _acts("use_vllm", False, "--rollout-backend vllm", "False: vLLM beside a GPU, the embedded engine on a CPU"),
    _acts(
        "vllm_mode",
        "colocate",
        "--colocate",
        "on GPUs. server: engines that the run starts on GPUs of their own (rollout_num_gpus)",
    ),
    _acts("vllm_model_impl", "vllm", "--vllm-model-impl"),
    _acts("vllm_enable_sleep_mode", False, "--offload-rollout", "by default on where engines share GPUs"),
    _acts("vllm_gpu_memory_utilization", 0.3, "--vllm-gpu-memory-utilization", "the plan chooses unless it is given"),
    _acts("vllm_max_model_length", None, "--vllm-max-model-len"),
    _acts("vllm_tensor_parallel_size", 1, "--rollout-num-gpus-per-engine"),
    _acts(
        "vllm_importance_sampling_correction",
        True,
        "--use-tis",
        "with use_vllm, as in TRL; not with top_p or top_k",
    ),
    _acts("vllm_importance_sampling_mode", "sequence_mask", "--tis-level --tis-mode"),
    _acts("vllm_importance_sampling_clip_max", 3.0, "--tis-clip", "None: 1e6"),
    _acts("vllm_importance_sampling_clip_min", None, "--tis-clip-low"),
    _acts("vllm_importance_sampling_cap", None, "--tis-clip", "the older name of ..._clip_max"),
    *_not_here(
        "the run starts and ends its engines itself; rollout_external_engine_addrs names some that run already",
        vllm_server_base_url=None,
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
    ),
    *_idle(
        "weights reach the engines by weight_sync, within sync_timeout; engine_start_timeout bounds their start",
        vllm_group_port=51216,
        vllm_server_timeout=240.0,
        ds3_gather_for_generation=True,
    ),
    *_idle(
        "an engine generates, not transformers",
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
        cache_implementation=None,
        use_cache=False,
        pad_to_multiple_of="auto",
    ),
    *_not_here("a generate function calls tools (custom_generate_function_path)", max_tool_calling_iterations=None),
    # ---- optimizer
    _acts("learning_rate", 1e-6, "--lr"),
    _acts(
        "lr_scheduler_type",
        "linear",
        "--lr-decay-style",
        "linear, cosine, cosine_with_min_lr, constant, constant_with_warmup, inverse_sqrt (with warm-up); not others",
    ),
    _acts("lr_scheduler_kwargs", None, "--min-lr", "min_lr or min_lr_rate of cosine_with_min_lr"),
    _acts("warmup_steps", 0, "--lr-warmup-iters", "below 1: that part of all steps"),
    _acts("optim", "adamw_torch_fused", "--optimizer", "AdamW by any of its names, or in 8 bits; not others"),
    _acts("weight_decay", 0.0, "--weight-decay", "not of biases and norms, as there"),
    _acts("adam_beta1", 0.9, "--adam-beta1"),
    _acts("adam_beta2", 0.999, "--adam-beta2"),
    _acts("adam_epsilon", 1e-8, "--adam-eps"),
    _acts("max_grad_norm", 1.0, "--clip-grad"),
    *_not_here("AdamW has no such arguments here", optim_args=None, optim_target_modules=None),
    *_not_here("of supervised losses", label_smoothing_factor=0.0, neftune_noise_alpha=None),
    # ---- model, precision, memory
    _acts("trust_remote_code", False, "--trust-remote-code"),
    _acts(
        "bf16",
        None,
        "--precision",
        "True: weights and activations in bf16, the optimizer's masters in fp32; None: bf16 on a GPU, fp32 on a CPU",
    ),
    _acts(
        "gradient_checkpointing",
        True,
        "--recompute-granularity full",
        "only where it is given: memory alone depends on it, and the plan counts it",
    ),
    _acts("use_cpu", False, "--device cpu"),
    *_not_here("precisions are bf16 and fp32", fp16=False, tf32=None),
    *_not_here("the model is built from the config.json of its folder", model_init_kwargs=None),
    *_not_here("logits are a product in the model's precision, log-probs fp32", cast_lm_head_to_fp32=False),
    *_idle("an architecture of docs/models.md has no dropout that would act", disable_dropout=False),
    *_idle(
        "memory or speed alone: torch.compile, chunks of logits and the plan take their place",
        gradient_checkpointing_kwargs=None,
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
        use_liger_kernel=False,
        liger_kernel_config=None,
        torch_empty_cache_steps=None,
        average_tokens_across_devices=True,
    ),
    *_not_here("an out-of-memory error ends the run; `instep plan` says before what fits", auto_find_batch_size=False),
    # ---- saving, logging, evaluation
    _acts(
        "output_dir",
        None,
        "--run-dir",
        "below it: `checkpoints` (--save), `hf` (--save-hf, what save_model would write), metrics.jsonl, report.html",
    ),
    _acts("save_strategy", "steps", "--save --save-hf", "no, steps or epoch; there is always a save at the end"),
    _acts("save_steps", 500, "--save-interval", "in rollouts there; below 1: that part of all steps"),
    _acts("save_only_model", False, "--save-hf", "without --save"),
    _acts("resume_from_checkpoint", None, "--load", "a folder, or True: output_dir/checkpoints"),
    _acts("report_to", "none", "--use-wandb --use-tensorboard", "wandb, tensorboard; metrics.jsonl is always written"),
    _acts("run_name", None, "--wandb-group"),
    _acts("project", "huggingface", "--wandb-project"),
    _acts("num_completions_to_print", None, "--num-logged-samples", "in samples.jsonl: `instep samples RUN_DIR`"),
    _acts("eval_strategy", "no", "--eval-interval", "no, steps or epoch, with eval_dataset"),
    _acts("eval_steps", None, "--eval-interval", "in rollouts there; default: logging_steps"),
    _acts("logging_steps", 10, "--eval-interval", "for eval_steps alone: every step is logged"),
    _acts("eval_on_start", False, "--skip-eval-before-train", "its opposite"),
    _acts("num_generations_eval", None, "--n-samples-per-eval-prompt", "default: num_generations"),
    *_not_here("evaluations begin with the run", eval_delay=0),
    *_idle("there is no loss in an evaluation, only rewards", prediction_loss_only=False, per_device_eval_batch_size=8),
    *_idle(
        "an evaluation keeps rewards and samples, no tensors",
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        eval_accumulation_steps=None,
        include_for_metrics=[],
        batch_eval_metrics=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
        label_names=None,
    ),
    *_not_here(
        "every checkpoint is kept, and the last one is the result; metrics.jsonl says which was the best",
        save_total_limit=None,
        load_best_model_at_end=False,
        metric_for_best_model=None,
        greater_is_better=None,
    ),
    *_idle(
        "checkpoints are whole or not there, and a resume goes on where the data stopped",
        save_on_each_node=False,
        enable_jit_checkpoint=False,
        ignore_data_skip=False,
        restore_callback_states_from_checkpoint=False,
    ),
    *_not_here(
        "nothing is uploaded; `hf` below the run's folder is what one would upload",
        push_to_hub=False,
        hub_token=None,
        hub_private_repo=None,
        hub_model_id=None,
        hub_strategy="every_save",
        hub_always_push=False,
        hub_revision=None,
        log_completions_hub_repo=None,
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=None,
    ),
    *_idle(
        "each step is a row of metrics.jsonl, samples are in samples.jsonl, errors say what they mean",
        logging_strategy="steps",
        logging_first_step=False,
        log_on_each_node=True,
        logging_nan_inf_filter=True,
        include_num_input_tokens_seen="no",
        log_level="passive",
        log_level_replica="warning",
        disable_tqdm=None,
        log_completions=False,
        log_multimodal=True,
        log_unique_prompts=False,
        skip_memory_metrics=True,
        debug="",
    ),
    # ---- processes and data loading
    *_not_here(
        "--train-backend hf is FSDP2, megatron has tensor, pipeline, context and expert parallelism (docs/megatron.md)",
        fsdp=None,
        fsdp_config=None,
        deepspeed=None,
        accelerator_config=None,
        parallelism_config=None,
    ),
    *_idle(
        "instep starts its processes itself and bounds their waits (train_timeout)",
        ddp_find_unused_parameters=None,
        ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=None,
        ddp_static_graph=None,
        ddp_backend=None,
        ddp_timeout=1800,
        local_rank=-1,
    ),
    *_idle(
        "prompts are read from a file as they are needed; all columns reach the reward functions",
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        remove_unused_columns=False,
        length_column_name="length",
    ),
    *_not_here("prompts come shuffled or in their order (shuffle_dataset)", train_sampling_strategy="random"),
    *_idle("the call itself says what is done", do_train=False, do_eval=False, do_predict=False),
)

# Arguments of GRPOTrainer beside its config.
TRAINER: tuple[Field, ...] = (
    Field("model", None, "acts", "--hf-checkpoint", "a folder, or a name of the hub"),
    Field(
        "reward_funcs",
        None,
        "acts",
        "--custom-rm-path --group-rm",
        "a function or a list of them, each a function in TRL's form or the dotted path of one; called for a "
        "group at a time. Not a reward model: call one in a function",
    ),
    Field("args", None, "acts", "", "a GRPOConfig, or a dict of its fields; or the fields as keywords"),
    Field("train_dataset", None, "acts", "--prompt-data", "a datasets.Dataset, a data frame, columns or rows"),
    Field("eval_dataset", None, "acts", "--eval-prompt-data", "the same, or a dict of them"),
    *_not_here("the tokenizer is that of the model's folder", processing_class=None, reward_processing_classes=None),
    *_not_here("`for step in instep.Run(...)` is the loop, whose body is yours", callbacks=None),
    *_not_here("lora_rank and lora_alpha train an adapter, with train_backend='hf'", peft_config=None),
    *_not_here(
        "AdamW it is: learning_rate, optim and their like say how", optimizers=None, optimizer_cls_and_kwargs=None
    ),
    *_not_here("custom_generate_function_path or rollout_function_path takes yours", rollout_func=None, tools=None),
    *_not_here("custom_generate_function_path plays a turn of yours", environment_factory=None),
    *_not_here("the model is loaded as its folder has it", quantization_config=None),
)
