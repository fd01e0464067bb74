"""What settings of TRL, verl and OpenRLHF are here: the tables of docs/migration.md.

The names of slime, vime, Atropos and Megatron need no table: they are flags, with a status of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from instep.arguments.all_flags import find
from instep.arguments.flag import FlagStatus
from instep.arguments.other_names import Found

_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_WORST: tuple[FlagStatus, ...] = ("refused", "later", "acts")


@dataclass(frozen=True)
class Row:
    """One setting of another framework.

    Attributes:
        name: its names, with a comma between them; one value of it may follow the name.
        default: its default there.
        here: instep's flags, as one would type them; empty if there is none.
    """

    name: str
    default: str
    here: str = ""
    note: str = ""

    @property
    def flags(self) -> list[str]:
        return _FLAG.findall(self.here)

    @property
    def status(self) -> str:
        """acts, later, refused; "none" without a flag."""
        found = {flag.status for name in self.flags if (flag := find(name)) is not None}
        return next((s for s in _WORST if s in found), "none")

    @property
    def names(self) -> list[tuple[str, str, str]]:
        """Each of its names in full, the value of it that the row is about ("": any), and what that is here."""
        first, *others = re.split(r", | or ", self.name)
        prefix = "" if " or " in self.name else first.partition(" ")[0].rpartition(".")[0]
        words = [first, *(w if "." in w.lstrip(".") or not prefix else f"{prefix}.{w.lstrip('.')}" for w in others)]
        here = self.flags if len(self.flags) == len(words) > 1 else [self.here] * len(words)
        pairs = (word.partition(" ")[::2] for word in words)
        return [(name, "" if value[:1] == "(" else value, h) for (name, value), h in zip(pairs, here, strict=True)]


TRL = (
    Row("model, model_name_or_path", "", "--hf-checkpoint"),
    Row("processing_class or tokenizer", "", "", "the folder of --hf-checkpoint has it: save yours there"),
    Row("callbacks", "", "", "`for step in instep.Run(...)` is the loop, whose body is yours"),
    Row("train_dataset, dataset_name", "", "--prompt-data FILE --input-key prompt", "or ORG/NAME:CONFIG:SPLIT"),
    Row("eval_dataset", "", "--eval-prompt-data NAME FILE"),
    Row("reward_funcs", "", "--custom-rm-path", "one function per run, as it is; add several up in it"),
    Row("run_name, project", "", "--wandb-group --wandb-project", "with --use-wandb"),
    Row("learning_rate", "1e-6", "--lr"),
    Row("lr_scheduler_type", "linear", "--lr-decay-style"),
    Row("warmup_steps", "0", "--lr-warmup-iters"),
    Row("weight_decay", "0", "--weight-decay", "0.01 here"),
    Row("adam_beta1, adam_beta2, adam_epsilon", "0.9, 0.999, 1e-8", "--adam-beta1 --adam-beta2 --adam-eps"),
    Row("max_grad_norm", "1.0", "--clip-grad"),
    Row("bf16", "", "--precision bf16", "weights and activations; optimizer state stays fp32"),
    Row("optim", "adamw_torch_fused", "--optimizer", "adam here is AdamW; adamw_8bit has its name"),
    Row("gradient_checkpointing", "", "--recompute-granularity full", "or selective: faster, with more memory"),
    Row("num_generations", "8", "--n-samples-per-prompt"),
    Row("num_generations_eval", "", "--n-samples-per-eval-prompt", "1 here, not that of training"),
    Row("generation_batch_size", "", "--rollout-batch-size", "counts prompts here, completions in TRL: divide"),
    Row("steps_per_generation", "", "--num-steps-per-rollout", "optimizer steps here; TRL also counts accumulation"),
    Row(
        "per_device_train_batch_size",
        "",
        "--micro-batch-size",
        "memory only; or --use-dynamic-batch-size and --max-tokens-per-gpu",
    ),
    Row("gradient_accumulation_steps", "", "--global-batch-size", "samples per step; accumulation follows"),
    Row("max_steps, num_train_epochs", "", "--num-rollout", "or --num-epoch; a rollout may hold several steps"),
    Row(
        "num_iterations", "1", note="each sample is trained on once; several steps per rollout: --num-steps-per-rollout"
    ),
    Row("max_completion_length", "512", "--rollout-max-response-len"),
    Row("max_prompt_length", "", "--rollout-max-prompt-len", "longer ones are left out, and counted"),
    Row("max_length", "1024", "", "a conversation is never cut"),
    Row("shuffle_dataset", "True", "--rollout-shuffle", "off unless given"),
    Row("temperature, top_p, top_k", "1.0, 1.0, 0", "--rollout-temperature --rollout-top-p --rollout-top-k"),
    Row("min_p, repetition_penalty, generation_kwargs", "", note="by --custom-generate-function-path"),
    Row("chat_template_kwargs", "", "--apply-chat-template-kwargs"),
    Row(
        "beta", "0.0", "--use-kl-loss --kl-loss-coef --kl-loss-type k3", "TRL's estimator is k3; k1 is the default here"
    ),
    Row("use_bias_correction_kl", "True", "--use-unbiased-kl", "off unless given"),
    Row("epsilon, epsilon_high", "0.2", "--eps-clip --eps-clip-high"),
    Row("delta", "", "--eps-clip-c", "both bound the ratio where the advantage is negative; here c is above 1"),
    Row("loss_type dapo", "yes", "--calculate-per-token-loss", "mean over all tokens of a step"),
    Row("loss_type grpo", "", "", "the default here: mean over samples of each sample's mean"),
    Row("loss_type cispo", "", "--advantage-estimator cispo --calculate-per-token-loss", "epsilon_high 5 is 4 here"),
    Row("loss_type sapo", "", "--advantage-estimator sapo --sapo-tau-pos --sapo-tau-neg"),
    Row(
        "importance_sampling_level sequence",
        "token",
        "--advantage-estimator gspo --gspo-gradient sequence",
        "3e-4 and 4e-4 unless given",
    ),
    Row(
        "loss_type dr_grpo",
        "",
        "--advantage-estimator dr_grpo --constant-loss-length",
        "the length is TRL's max_completion_length",
    ),
    Row("loss_type bnpo, vespo, luspo", "", "", "none of these: --custom-loss-function-path takes a loss of yours"),
    Row("off_policy_mask_threshold", "", "--use-opsm --opsm-delta", "against the old policy"),
    Row("scale_rewards False", "group", "--disable-grpo-std-normalization"),
    Row("scale_rewards batch", "", "--custom-reward-post-process-path", "a function of yours"),
    Row("reward_weights", "", "", "weigh them in your --custom-rm-path"),
    Row("mask_truncated_completions", "False", "--rollout-sample-filter-path", "mark them remove_sample"),
    Row(
        "sync_ref_model, ref_model_sync_steps", "False, 512", "--ref-update-interval", "in rollouts; a copy, no mix-up"
    ),
    Row("entropy_coef", "0.0", "--entropy-coef"),
    Row("use_vllm", "False", "--rollout-backend vllm"),
    Row("vllm_mode", "colocate", "--colocate", "on GPUs; server: leave it out"),
    Row("vllm_gpu_memory_utilization", "0.3", "--vllm-gpu-memory-utilization"),
    Row("vllm_max_model_length", "", "--vllm-max-model-len"),
    Row("vllm_tensor_parallel_size", "1", "--rollout-num-gpus-per-engine", "1 with the embedded engine"),
    Row("vllm_enable_sleep_mode", "False", "--offload-rollout", "with --colocate on GPUs it is on"),
    Row(
        "vllm_server_host, vllm_server_port", "0.0.0.0, 8000", "--engine-port", "instep starts the engine, on loopback"
    ),
    Row(
        "vllm_importance_sampling_correction",
        "True",
        "--use-tis --tis-level sequence --tis-mode mask --tis-clip 3",
        "this is TRL's default; off unless given",
    ),
    Row("log_completions", "False", "--num-logged-samples", "always logged: `instep samples RUN`"),
    Row("report_to", "", "--use-wandb --use-tensorboard", "metrics.jsonl is always written"),
    Row("save_steps, output_dir", "", "--save-interval --save", "in rollouts"),
    Row("resume_from_checkpoint", "", "--load"),
    Row("eval_steps", "", "--eval-interval", "in rollouts"),
    Row("lora_r, lora_alpha", "16, 32", "--lora-rank --lora-alpha", "off unless given"),
    Row("lora_target_modules, lora_dropout", "", "--lora-target-modules", "all linear layers; no dropout"),
    Row("peft_config, use_peft", "", "--lora-rank"),
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL = (
    Row("actor_rollout_ref.model.path", "", "--hf-checkpoint"),
    Row("data.train_files, data.prompt_key", "", "--prompt-data --input-key", "the label has a column: --label-key"),
    Row("data.val_files", "", "--eval-prompt-data NAME FILE"),
    Row("data.max_prompt_length", "512", "--rollout-max-prompt-len", "longer ones are left out, and counted"),
    Row("data.max_response_length", "512", "--rollout-max-response-len"),
    Row("data.train_batch_size", "1024", "--rollout-batch-size", "prompts, in both"),
    Row("data.gen_batch_size", "", "--over-sampling-batch-size"),
    Row("data.shuffle, data.seed", "True", "--rollout-shuffle --rollout-seed", "off unless given"),
    Row(
        "reward.reward_kwargs.overlong_buffer_cfg.len, .penalty_factor",
        "",
        "--overlong-buffer-len --overlong-penalty-factor",
        "1 unless given",
    ),
    Row("data.truncation", "error", "", "a prompt is never cut"),
    Row("data.apply_chat_template_kwargs", "{}", "--apply-chat-template-kwargs"),
    Row("reward.custom_reward_function.path, .name", "", "--custom-rm-path MODULE.NAME", "async f(args, sample)"),
    Row("reward.reward_model.enable", "False", "--rm-type remote_rm --rm-url", "a server of yours"),
    Row("algorithm.adv_estimator grpo", "gae", "--advantage-estimator grpo", "the default here"),
    Row("algorithm.adv_estimator gae", "", "--advantage-estimator ppo", "docs/algorithms.md"),
    Row("algorithm.adv_estimator rloo", "", "--advantage-estimator rloo"),
    Row("algorithm.adv_estimator reinforce_plus_plus", "", "--advantage-estimator reinforce_plus_plus"),
    Row(
        "algorithm.adv_estimator reinforce_plus_plus_baseline", "", "--advantage-estimator reinforce_plus_plus_baseline"
    ),
    Row("algorithm.norm_adv_by_std_in_grpo False", "True", "--disable-grpo-std-normalization"),
    Row("algorithm.gamma, algorithm.lam", "1.0, 1.0", "--gamma --lambd"),
    Row("algorithm.use_kl_in_reward, kl_ctrl.kl_coef", "False, 0.001", "--kl-coef"),
    Row("algorithm.filter_groups.enable", "False", "--dynamic-sampling-filter-path", "f(args, group) -> bool"),
    Row("algorithm.rollout_correction.rollout_is token", "", "--use-tis --tis-clip", "threshold 2.0 in both"),
    Row("algorithm.rollout_correction.rollout_is sequence", "", "--use-tis --tis-level sequence --tis-clip"),
    Row("algorithm.rollout_correction.bypass_mode", "False", "--use-rollout-logprobs"),
    Row(ACTOR + "strategy fsdp", "fsdp", "--train-backend hf", "megatron is the default here"),
    Row(ACTOR + "ppo_mini_batch_size", "256", "--global-batch-size", "samples here, prompts in verl: times n"),
    Row(ACTOR + "ppo_micro_batch_size_per_gpu", "", "--micro-batch-size", "memory only"),
    Row(
        ACTOR + "use_dynamic_bsz, ppo_max_token_len_per_gpu",
        "False, 16384",
        "--use-dynamic-batch-size --max-tokens-per-gpu",
    ),
    Row(ACTOR + "ppo_epochs", "1", "", "each sample is trained on once"),
    Row(ACTOR + "clip_ratio_low, clip_ratio_high", "0.2", "--eps-clip --eps-clip-high"),
    Row(ACTOR + "clip_ratio_c", "3.0", "--eps-clip-c", "off unless given: give 3"),
    Row(ACTOR + "loss_agg_mode token-mean", "yes", "--calculate-per-token-loss"),
    Row(ACTOR + "loss_agg_mode seq-mean-token-mean", "", "", "the default here"),
    Row(
        ACTOR + "loss_agg_mode seq-mean-token-sum-norm",
        "",
        "--constant-loss-length",
        "verl's loss_scale_factor, there the padded response length unless given",
    ),
    Row(ACTOR + "policy_loss.loss_mode gspo", "vanilla", "--advantage-estimator gspo"),
    Row(ACTOR + "policy_loss.loss_mode cispo", "", "--advantage-estimator cispo"),
    Row(ACTOR + "policy_loss.loss_mode sapo", "", "--advantage-estimator sapo", "tau_pos 1 and tau_neg 1.05 in both"),
    Row(
        ACTOR + "policy_loss.loss_mode dppo_tv",
        "",
        "--advantage-estimator dppo_tv",
        "0.15 unless given; the ratio has no bound unless --eps-clip-c is given; bypass_mode is on",
    ),
    Row(ACTOR + "policy_loss.loss_mode dppo_kl", "", "--advantage-estimator dppo_kl", "0.05 unless given; the same"),
    Row(ACTOR + "use_kl_loss, kl_loss_coef", "False, 0.001", "--use-kl-loss --kl-loss-coef", "0 unless given"),
    Row(ACTOR + "kl_loss_type", "low_var_kl", "--kl-loss-type low_var_kl", "k1 unless given"),
    Row(ACTOR + "entropy_coeff", "0", "--entropy-coef"),
    Row(ACTOR + "optim.lr, optim.weight_decay", "1e-6, 0.01", "--lr --weight-decay"),
    Row(ACTOR + "optim.lr_warmup_steps, lr_warmup_steps_ratio", "-1, 0", "--lr-warmup-iters --lr-warmup-fraction"),
    Row(ACTOR + "optim.lr_scheduler_type", "constant", "--lr-decay-style constant", "linear unless given"),
    Row(ACTOR + "grad_clip", "1.0", "--clip-grad"),
    Row(ACTOR + "fsdp_config.optimizer_offload", "False", "--optimizer-cpu-offload", "the moments"),
    Row(
        ACTOR + "megatron.tensor_model_parallel_size, pipeline_...",
        "1",
        "--tensor-model-parallel-size --pipeline-model-parallel-size",
    ),
    Row(ACTOR + "megatron.context_parallel_size", "1", "--context-parallel-size"),
    Row("actor_rollout_ref.model.lora_rank", "0", "--lora-rank"),
    Row("actor_rollout_ref.model.lora_alpha", "16", "--lora-alpha", "twice the rank unless given"),
    Row("actor_rollout_ref.model.target_modules", "all-linear", "--lora-target-modules", "the same unless given"),
    Row(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "True",
        "--recompute-granularity full",
        "off unless given",
    ),
    Row(ROLLOUT + "name vllm", "", "--rollout-backend vllm"),
    Row(ROLLOUT + "n", "1", "--n-samples-per-prompt", "8 unless given"),
    Row(ROLLOUT + "temperature, top_p, top_k", "1.0, 1, -1", "--rollout-temperature --rollout-top-p --rollout-top-k"),
    Row(
        ROLLOUT + "val_kwargs.temperature, .n",
        "0, 1",
        "--eval-temperature --n-samples-per-eval-prompt",
        "greedy: give 0",
    ),
    Row(ROLLOUT + "gpu_memory_utilization", "0.5", "--vllm-gpu-memory-utilization"),
    Row(ROLLOUT + "tensor_model_parallel_size", "2", "--rollout-num-gpus-per-engine", "1 with the embedded engine"),
    Row(ROLLOUT + "max_model_len, max_num_seqs", "", "--vllm-max-model-len --vllm-max-num-seqs"),
    Row(ROLLOUT + "calculate_log_probs", "True", "", "always; the gap is reported at every step"),
    Row(ROLLOUT + "multi_turn, agent loops", "", "--custom-generate-function-path", "tools are your own code"),
    Row(
        ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes",
        "2048",
        "--update-weight-buffer-size",
        "bytes here",
    ),
    Row("trainer.nnodes, trainer.n_gpus_per_node", "1, 8", "--actor-num-nodes --actor-num-gpus-per-node"),
    Row("trainer.total_epochs, total_training_steps", "30", "--num-epoch --num-rollout", "one of the two"),
    Row("trainer.save_freq, default_local_dir", "-1", "--save-interval --save"),
    Row(
        "trainer.resume_mode, resume_from_path",
        "auto",
        "--load",
        "the folder of --save: goes on with what is there, or begins",
    ),
    Row("trainer.test_freq, val_before_train", "-1, True", "--eval-interval --skip-eval-before-train"),
    Row("trainer.val_only", "False", "--num-rollout 0"),
    Row("trainer.logger", "console, wandb", "--use-wandb --use-tensorboard"),
    Row("trainer.rollout_data_dir", "", "--save-debug-rollout-data"),
    Row("trainer.balance_batch", "True", "--balance-data", "off unless given"),
    Row("trainer.critic_warmup", "0", "--num-critic-only-steps"),
    Row("trainer.device", "cuda", "--device", "auto here"),
)


TRL_DPO = (
    Row("beta", "0.1", "--dpo-beta"),
    Row("label_smoothing", "0.0", "--dpo-label-smoothing"),
    Row("per_device_train_batch_size", "", "--micro-batch-size", "pairs; memory only"),
    Row("gradient_accumulation_steps", "", "--global-batch-size", "pairs per step; accumulation follows"),
    Row("max_length, max_prompt_length", "1024", "", "a pair is never cut"),
)

_IS = "algo.advantage.is_correction_"
OPENRLHF = (
    Row("actor.model_name_or_path or pretrain", "", "--hf-checkpoint"),
    Row("data.prompt_dataset or prompt_data", "", "--prompt-data", "jsonl or parquet files, with commas between"),
    Row("data.prompt_probs or prompt_data_probs", "", "--prompt-data-weights"),
    Row("data.input_key", "input", "--input-key"),
    Row("data.label_key", "", "--label-key"),
    Row("data.apply_chat_template", "False", "--apply-chat-template"),
    Row("data.max_len or prompt_max_len", "2048", "--rollout-max-prompt-len", "the prompt alone here"),
    Row("rollout.max_new_tokens or generate_max_len", "", "--rollout-max-response-len"),
    Row("rollout.batch_size", "1024", "--rollout-batch-size"),
    Row("rollout.n_samples_per_prompt", "1", "--n-samples-per-prompt", "8 unless given"),
    Row("rollout.temperature", "1.0", "--rollout-temperature"),
    Row("rollout.top_p", "1.0", "--rollout-top-p"),
    Row("train.batch_size or train_batch_size", "128", "--global-batch-size", "samples per optimizer step"),
    Row("train.micro_batch_size or micro_train_batch_size", "1", "--micro-batch-size", "memory only"),
    Row("rollout.micro_batch_size or micro_rollout_batch_size", "1", "", "the engine batches by itself"),
    Row("train.dynamic_batch_enable", "False", "--use-dynamic-batch-size"),
    Row("train.max_tokens_per_gpu", "16192", "--max-tokens-per-gpu"),
    Row("train.num_episodes or num_episodes", "1", "--num-epoch", "passes over the prompts; or --num-rollout"),
    Row("train.max_epochs or max_epochs", "1", "", "each sample is trained on once"),
    Row("train.seed", "42", "--seed"),
    Row(
        "train.async_enable or async_train",
        "False",
        "--max-staleness",
        "of `instep train-async`, which is a command (docs/async.md)",
    ),
    Row("train.partial_rollout_enable", "False", "--partial-rollout"),
    Row("train.agent_func_path or agent_func_path", "", "--custom-generate-function-path", "tools are your own code"),
    Row("train.colocate_all or colocate_all_models", "False", "--colocate"),
    Row("actor.adam.lr or actor_learning_rate", "1e-6", "--lr"),
    Row("critic.adam.lr or critic_learning_rate", "9e-6", "--critic-lr", "--lr unless given"),
    Row("actor.adam.weight_decay or l2", "0.0", "--weight-decay", "0.01 unless given"),
    Row("actor.adam.betas or adam_betas", "0.9 0.95", "--adam-beta1 0.9 --adam-beta2 0.95", "0.999 unless given"),
    Row("actor.lr_scheduler", "cosine_with_min_lr", "--lr-decay-style cosine", "linear unless given"),
    Row("actor.lr_warmup_ratio", "0.03", "--lr-warmup-fraction"),
    Row("actor.max_norm", "1.0", "--clip-grad"),
    Row("actor.eps_clip", "0.2", "--eps-clip"),
    Row("actor.eps_clip_low_high", "", "--eps-clip --eps-clip-high"),
    Row("actor.dual_clip", "", "--eps-clip-c"),
    Row("actor.entropy_coef or entropy_loss_coef", "", "--entropy-coef"),
    Row("actor.policy_loss_type gspo", "PPO", "--advantage-estimator gspo"),
    Row("actor.gradient_checkpointing_enable", "False", "--recompute-granularity full", "see docs/arguments.md"),
    Row("critic.value_clip", "0.5", "--value-clip", "0.2 unless given"),
    Row("critic.freezing_steps or freezing_actor_steps", "-1", "--num-critic-only-steps"),
    Row("algo.advantage.estimator", "gae", "--advantage-estimator", "gae is ppo here; grpo unless given"),
    Row("algo.advantage.gamma", "1", "--gamma"),
    Row("algo.advantage.lambd", "1", "--lambd"),
    Row("algo.advantage.no_std_norm", "False", "--disable-grpo-std-normalization"),
    Row(_IS + "enable or enable_vllm_is_correction", "False", "--use-tis"),
    Row(_IS + "threshold", "0.5 5.0", "--tis-clip-low --tis-clip"),
    Row("algo.kl.init_coef or init_kl_coef", "0.01", "--kl-coef", "0 unless given"),
    Row("algo.kl.use_loss", "False", "--use-kl-loss --kl-loss-coef"),
    Row("algo.kl.estimator or kl_estimator", "k1", "--kl-loss-type"),
    Row("algo.dynamic_filtering_enable or dynamic_filtering", "False", "--dynamic-sampling-filter-path"),
    Row("reward.remote_url or remote_rm_url", "", "--rm-type remote_rm --rm-url", "or a function: --custom-rm-path"),
    Row("reward.model_name_or_path or reward_pretrain", "", "", "serve it, and ask it in your --custom-rm-path"),
    Row("reward.overlong_buffer_len", "", "--overlong-buffer-len"),
    Row("reward.overlong_penalty_factor", "1", "--overlong-penalty-factor"),
    Row("vllm.num_engines or vllm_num_engines", "", "--rollout-num-gpus", "engines times GPUs of one"),
    Row("vllm.tensor_parallel_size or vllm_tensor_parallel_size", "1", "--rollout-num-gpus-per-engine"),
    Row("vllm.gpu_memory_utilization", "0.95", "--vllm-gpu-memory-utilization"),
    Row("vllm.sync_backend or vllm_sync_backend", "nccl", "--weight-sync nccl"),
    Row("vllm.enable_sleep or vllm_enable_sleep", "False", "--offload-rollout", "with --colocate on GPUs it is on"),
    Row("ds.zero_stage or zero_stage", "2", "--train-backend hf", "FSDP2, which shards weights, gradients and states"),
    Row("ds.lora.rank or lora_rank", "0", "--lora-rank"),
    Row("ds.lora.alpha or lora_alpha", "16", "--lora-alpha", "twice the rank unless given"),
    Row("ds.lora.target_modules or target_modules", "all-linear", "--lora-target-modules", "the same unless given"),
    Row("ds.packing_samples or packing_samples", "False", "", "samples are always packed"),
    Row("ds.ring_attn_size or ring_attn_size", "1", "--context-parallel-size"),
    Row("ckpt.path or ckpt_path", "", "--save"),
    Row("ckpt.output_dir or save_path", "", "--save-hf", "a Hugging Face folder"),
    Row("ckpt.load_enable or load_checkpoint", "False", "--load", "the folder of --save"),
    Row("ckpt.save_steps", "-1", "--save-interval", "in rollouts"),
    Row("eval.steps", "-1", "--eval-interval", "in rollouts"),
    Row("eval.dataset or eval_dataset", "", "--eval-prompt-data NAME FILE"),
    Row("logger.wandb.key", "", "--use-wandb --wandb-key"),
)

# By the framework whose names they are; those before are looked up first.
_TABLES = {"OpenRLHF": OPENRLHF, "verl": VERL, "TRL": TRL}


@cache
def settings(command: str) -> list[tuple[str, str, Found]]:
    """The names of all tables, lower case; those of `TRL_DPO` replace the same ones of the others for `instep dpo`."""
    own = {"TRL": TRL_DPO} if command == "dpo" else {}
    replaced = {name for row in own.get("TRL", ()) for name, _, _ in row.names}
    return [
        (name.lower(), value, Found(whose, name, here, row.note))
        for tables in (own, _TABLES)
        for whose, table in tables.items()
        for row in table
        for name, value, here in row.names
        if tables is own or name not in replaced
    ]
