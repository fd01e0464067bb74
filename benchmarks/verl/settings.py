"""What `run_verl.py` tells verl 0.9.1, as overrides of its `ppo_trainer.yaml`.

`work` is what all peers of `benchmarks/gpu_grpo.py` do. `DOCUMENTED` are the settings of verl's own
`examples/grpo_trainer/run_qwen3_8b_fsdp.sh`, on one GPU and without its KL loss, for which no peer has a reference
model. `tuned` is what its guide to performance names, as far as it made sense on one GPU.
"""

from __future__ import annotations

from pathlib import Path

PROMPTS, SAMPLES, PROMPT = 32, 8, 128
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# A prompt is its words, as with the peers; verl puts every prompt through a chat template.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DOCUMENTED = [
    f"{MODEL}.use_remove_padding=true",
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=24576",
    f"{ACTOR}.fsdp_config.param_offload=false",
    f"{ACTOR}.fsdp_config.optimizer_offload=false",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=24576",
    "trainer.balance_batch=true",
]
# Without FlashAttention: all samples have one length, so rows need no packing, and log-probs come from the fused
# kernel, as verl's other form takes a pass of Python for each token.
WITHOUT_FLASH_ATTENTION = [
    f"+{MODEL}.override_config.attn_implementation=sdpa",
    f"{MODEL}.use_remove_padding=false",
    f"{MODEL}.use_fused_kernels=true",
    f"{MODEL}.fused_kernel_options.impl_backend=torch",
]


def work(model: Path, folder: Path, steps: int, new_tokens: int) -> list[str]:
    """Model, data, algorithm and Ray, whose processes stay on the loopback interface.

    Args:
        folder: with train.parquet and the tokenizer.
    """
    data = folder / "train.parquet"
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={new_tokens}",
        f"{MODEL}.path={model}",
        f"{MODEL}.tokenizer_path={folder}",
        f'{MODEL}.custom_chat_template="{TEMPLATE}"',
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",  # prompts: one optimizer step
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.entropy_coeff=0",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.ignore_eos=true",
        f"reward.custom_reward_function.path={Path(__file__).with_name('reward.py')}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
        "+ray_kwargs.ray_init.address=local",
        "ray_kwargs.ray_init.num_cpus=20",  # what its actors claim is 13; Ray starts so many processes at once
        "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "+ray_kwargs.ray_init.object_store_memory=4000000000",
    ]


def tuned(max_tokens: int) -> list[str]:
    """Micro-batches of `max_tokens` without checkpointing, fused kernels, and no pass for the old log-probs.

    With one optimizer step a rollout, the engine's log-probs are the old ones (`bypass_mode`), as with instep.
    """
    return [
        *DOCUMENTED,
        f"{MODEL}.enable_gradient_checkpointing=false",
        f"{MODEL}.use_liger=true",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.fsdp_config.reshard_after_forward=false",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max_tokens}",
        "algorithm.rollout_correction.bypass_mode=true",
        f"{ROLLOUT}.max_num_batched_tokens=16384",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=4096",
    ]
