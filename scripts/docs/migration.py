"""docs/migration.md: what the flags of slime, vime, TRL and verl are here.

`python scripts/docs/migration.py > docs/migration.md` writes it. What slime and vime say comes from the flag table;
TRL and verl have tables here, in which the status of a setting is that of the flags that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.arguments.all_flags import find, own_flags
from instep.arguments.flag import Flag, FlagStatus

_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_WORST: tuple[FlagStatus, ...] = ("refused", "later", "acts")


@dataclass(frozen=True)
class Row:
    """One setting of TRL or verl.

    Attributes:
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


TRL = (
    Row("model (of GRPOTrainer)", "", "--hf-checkpoint"),
    Row("train_dataset", "", "--prompt-data FILE --input-key prompt", "a jsonl or parquet file"),
    Row("eval_dataset", "", "--eval-prompt-data NAME FILE"),
    Row("reward_funcs", "", "--custom-rm-path", "one function per run: async f(args, sample); add several up in it"),
    Row("learning_rate", "1e-6", "--lr"),
    Row("lr_scheduler_type", "linear", "--lr-decay-style"),
    Row("warmup_steps", "0", "--lr-warmup-iters"),
    Row("weight_decay", "0", "--weight-decay", "0.01 here"),
    Row("adam_beta1, adam_beta2, adam_epsilon", "0.9, 0.999, 1e-8", "--adam-beta1 --adam-beta2 --adam-eps"),
    Row("max_grad_norm", "1.0", "--clip-grad"),
    Row("bf16", "", "--precision bf16", "weights and activations; optimizer state stays fp32"),
    Row("gradient_checkpointing", "", "--recompute-granularity full", "--train-backend megatron"),
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
    Row("loss_type bnpo, vespo, luspo", "", ""),
    Row("off_policy_mask_threshold", "", "--use-opsm --opsm-delta", "against the old policy"),
    Row("scale_rewards False", "group", "--disable-grpo-std-normalization"),
    Row("scale_rewards batch", "", "--custom-reward-post-process-path", "a function of yours"),
    Row("reward_weights", "", "", "weigh them in your --custom-rm-path"),
    Row("mask_truncated_completions", "False", "--rollout-sample-filter-path", "mark them remove_sample"),
    Row(
        "sync_ref_model, ref_model_sync_steps", "False, 512", "--ref-update-interval", "in rollouts; a copy, no mix-up"
    ),
    Row("entropy_coef", "0.0", "--entropy-coef"),
    Row("use_vllm, vllm_mode", "False, colocate", "--rollout-backend vllm"),
    Row("vllm_gpu_memory_utilization", "0.3", "--vllm-gpu-memory-utilization"),
    Row("vllm_max_model_length", "", "--vllm-max-model-len"),
    Row("vllm_tensor_parallel_size", "1", "--rollout-num-gpus-per-engine", "1 with the embedded engine"),
    Row("vllm_enable_sleep_mode", "False", "--offload-rollout"),
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
    Row("peft_config", "", "", "LoRA comes later"),
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
    Row(ACTOR + "use_kl_loss, kl_loss_coef", "False, 0.001", "--use-kl-loss --kl-loss-coef", "0 unless given"),
    Row(ACTOR + "kl_loss_type", "low_var_kl", "--kl-loss-type low_var_kl", "k1 unless given"),
    Row(ACTOR + "entropy_coeff", "0", "--entropy-coef"),
    Row(ACTOR + "optim.lr, optim.weight_decay", "1e-6, 0.01", "--lr --weight-decay"),
    Row(ACTOR + "optim.lr_warmup_steps, lr_warmup_steps_ratio", "-1, 0", "--lr-warmup-iters --lr-warmup-fraction"),
    Row(ACTOR + "optim.lr_scheduler_type", "constant", "--lr-decay-style constant", "linear unless given"),
    Row(ACTOR + "grad_clip", "1.0", "--clip-grad"),
    Row(
        ACTOR + "megatron.tensor_model_parallel_size, pipeline_...",
        "1",
        "--tensor-model-parallel-size --pipeline-model-parallel-size",
    ),
    Row(ACTOR + "megatron.context_parallel_size", "1", "--context-parallel-size"),
    Row("actor_rollout_ref.model.lora_rank", "0", "", "LoRA comes later"),
    Row(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "True",
        "--recompute-granularity full",
        "--train-backend megatron; off unless given",
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


def markdown() -> str:
    """docs/migration.md."""
    lines = [
        "# Coming from slime, vime, TRL or verl",
        "",
        "Made by `python scripts/docs/migration.py > docs/migration.md`; do not edit.",
        "",
        "*acts*: give the flag. *later*: the flag is known and refused today, with the reason. *refused*: it will not "
        "act. *none*: there is no flag; the note says what there is instead.",
        "",
        *_slime_and_vime(),
        "## TRL: GRPOConfig 1.16",
        "",
        *_table(TRL),
        "",
        "TRL's reward function gets lists of completions; here `async def reward(args, sample)` gets one sample "
        "(`sample.prompt`, `sample.response`, `sample.label`, `sample.metadata`), or a group with `--group-rm`.",
        "",
        "## verl 0.9",
        "",
        *_table(VERL),
        "",
        "verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` becomes `async def reward(args, "
        "sample)` with `sample.response`, `sample.label` and `sample.metadata`.",
        "",
    ]
    return "\n".join(lines)


def _slime_and_vime() -> Iterator[str]:
    flags = [f for f in dict.fromkeys(own_flags().values()) if set(f.whose) & set("VRSC")]
    other = [f for f in flags if f.status != "acts"]
    yield "## slime and vime"
    yield ""
    yield (
        f"Flags keep their names: {len(flags) - len(other)} of {len(flags)} act as they are named "
        "([arguments.md](arguments.md) has them with their defaults; `--n-samples-per-prompt` is 8, in slime 1). Those "
        "below do not. `--vllm-*` and `--router-*` take every flag of vLLM and its "
        "router ([engines_flags.md](engines_flags.md)); SGLang flags that are not listed here are refused, too. "
        "Megatron's flags are in [arguments.md](arguments.md), too. In hooks only the import paths change: "
        "`from instep.types import Sample`, `from instep.rollout.http import post`."
    )
    yield ""
    yield "| flag | status | why | instead |"
    yield "|---|---|---|---|"
    for status in ("later", "refused"):
        yield from (_cells(f"`{f.name}`", f.status, f.note, f.instead) for f in _by_note(other) if f.status == status)
    yield ""


def _by_note(flags: list[Flag]) -> list[Flag]:
    """The flags sorted by their note, in the order in which the notes first appear."""
    notes = list(dict.fromkeys(f.note for f in flags))
    return sorted(flags, key=lambda f: notes.index(f.note))


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    yield "| theirs | default | here | status | note |"
    yield "|---|---|---|---|---|"
    for row in rows:
        here = f"`{row.here}`" if row.here else ""
        yield _cells(f"`{row.name}`", row.default, here, row.status, row.note)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
