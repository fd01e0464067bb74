# Made by `python scripts/docs/args_stub.py`; do not edit.
from typing import Any, Literal

from instep.data.formats import EvalDataset

class Settings:
    actor_num_gpus_per_node: int
    actor_num_nodes: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    add_bos_token: bool
    add_qkv_bias: bool
    advantage_estimator: Literal[
        "grpo",
        "gspo",
        "cispo",
        "sapo",
        "dppo_tv",
        "dppo_kl",
        "dr_grpo",
        "rloo",
        "max_rl",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
    ]
    alarm_effective_sample_ratio: float
    alarm_entropy_fraction: float
    alarm_gap: float
    alarm_truncated_ratio: float
    alarm_zero_std_ratio: float
    allowed_hosts: list[str] | None
    api_key_file: str | None
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    async_save: bool
    atropos_timeout: float
    atropos_url: str
    attention_dropout: float
    balance_by_flops: bool
    balance_data: bool
    bf16: bool
    buffer_filter_path: str | None
    calculate_per_token_loss: bool
    chat_template: str | None
    chat_template_text: str | None
    chosen_key: str
    ckpt_format: Literal["torch_dist", "torch"]
    ckpt_step: int | None
    clip_grad: float
    cluster: str
    colocate: bool
    command: Literal["train", "train-async", "sft", "dpo", "serve", "plan"]
    constant_loss_length: int | None
    context_parallel_size: int
    controller_memory_limit: float | None
    critic_load: str | None
    critic_lr: float | None
    critic_lr_warmup_iters: int
    critic_num_gpus_per_node: int | None
    critic_num_nodes: int | None
    critic_save: str | None
    custom_advantage_function_path: str | None
    custom_convert_samples_to_train_data_path: str | None
    custom_eval_rollout_log_function_path: str | None
    custom_generate_function_path: str | None
    custom_loss_function_path: str | None
    custom_megatron_before_log_prob_hook_path: str | None
    custom_megatron_before_train_step_hook_path: str | None
    custom_megatron_init_path: str | None
    custom_model_provider_path: str | None
    custom_pg_loss_reducer_function_path: str | None
    custom_reward_post_process_path: str | None
    custom_rm_path: str | None
    custom_rollout_log_function_path: str | None
    custom_tis_function_path: str | None
    data_cache_path: str | None
    data_source_path: str
    debug_rollout_only: bool
    debug_train_only: bool
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    deterministic_mode: bool
    device: Literal["auto", "cpu", "cuda"]
    disable_bias_linear: bool | None
    dp_size: int
    dpo_beta: float
    dpo_label_smoothing: float
    dump_details: str | None
    dynamic_sampling_filter_path: str | None
    engine_port: int | None
    engine_start_timeout: float
    entropy_coef: float
    env: str | None
    env_address: str | None
    env_args: dict[str, Any]
    env_eval_args: dict[str, Any] | None
    env_num_servers: int
    env_python: str | None
    env_renderer: str | None
    eps_clip: float
    eps_clip_c: float | None
    eps_clip_high: float
    eval_config: str | None
    eval_datasets: list[EvalDataset]
    eval_function_path: str
    eval_input_key: str | None
    eval_interval: int | None
    eval_label_key: str | None
    eval_max_context_len: int | None
    eval_max_prompt_len: int | None
    eval_max_response_len: int | None
    eval_min_new_tokens: int | None
    eval_prompt_data: list[str] | None
    eval_reward_key: str | None
    eval_temperature: float | None
    eval_tool_key: str | None
    eval_top_k: int | None
    eval_top_p: float | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    extra_flags: list[str]
    ffn_hidden_size: int | None
    finetune: bool
    freeze_params_name_list: list[str] | None
    gamma: float
    global_batch_size: int
    gpu_memory_gb: float
    group_query_attention: bool
    group_rm: bool
    grpo_std_normalization: bool
    gspo_gradient: Literal["token", "sequence"]
    heartbeat_timeout: float
    hf_checkpoint: str
    hidden_dropout: float
    hidden_size: int | None
    hook_trial: bool
    input_key: str
    kl_coef: float
    kl_loss_coef: float
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"]
    kv_channels: int | None
    kv_lora_rank: int | None
    label_key: str | None
    lambd: float
    load: str | None
    load_debug_rollout_data: str | None
    load_debug_rollout_data_subsample: float | None
    log_passrate: bool
    lora_alpha: int | None
    lora_dropout: float
    lora_rank: int
    lora_target_modules: list[str] | None
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"]
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"]
    lr: float
    lr_decay_iters: int | None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_warmup_iters: int
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"]
    make_vocab_size_divisible_by: int
    mask_offpolicy_in_partial_rollout: bool
    max_position_embeddings: int | None
    max_staleness: int | None
    max_tokens_per_gpu: int | None
    megatron_config: dict[str, dict[str, Any]]
    megatron_config_path: str | None
    megatron_overrides: dict[str, Any]
    metadata_key: str
    micro_batch_size: int
    min_lr: float
    moe_aux_loss_coeff: float
    moe_ffn_hidden_size: int | None
    moe_grouped_gemm: bool
    moe_layer_freq: str | None
    moe_router_bias_update_rate: float
    moe_router_dtype: Literal["fp32", "fp64"] | None
    moe_router_enable_expert_bias: bool
    moe_router_group_topk: int | None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] | None
    moe_router_num_groups: int | None
    moe_router_pre_softmax: bool
    moe_router_score_function: Literal["softmax", "sigmoid"] | None
    moe_router_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_shared_expert_intermediate_size: int | None
    moe_z_loss_coeff: float | None
    mscale: float | None
    mscale_all_dim: float | None
    multi_latent_attention: bool
    n_samples_per_eval_prompt: int
    n_samples_per_prompt: int
    no_api_key: bool
    no_fast_log_probs: bool
    no_load_optim: bool
    no_offload_rollout: bool
    no_offload_train: bool
    no_save_optim: bool
    no_torch_compile: bool
    norm_epsilon: float | None
    normalization: Literal["LayerNorm", "RMSNorm"] | None
    normalize_advantages: bool
    notes: list[str]
    num_attention_heads: int | None
    num_critic_only_steps: int
    num_epoch: int | None
    num_experts: int | None
    num_gpus_per_node: int
    num_layers: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    num_logged_samples: int
    num_query_groups: int | None
    num_rollout: int | None
    num_steps_per_rollout: int
    num_threads: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    offload: bool
    offload_rollout: bool
    offload_train: bool
    on_gap: Literal["stop", "warn"]
    only_train_params_name_list: list[str] | None
    opd_kl_coef: float
    opd_teacher_ckpt_step: int | None
    opd_teacher_load: str | None
    opd_teacher_url: str | None
    opd_type: str | None
    opsm_delta: float
    optimizer: Literal["adam", "adamw_8bit"]
    optimizer_cpu_offload: bool
    over_sampling_batch_size: int
    overlong_buffer_len: int | None
    overlong_penalty_factor: float
    partial_rollout: bool
    pause_mode: str
    pipeline_model_parallel_size: int
    port: int
    position_embedding_type: Literal["rope"] | None
    precision: str
    prefill_num_servers: int | None
    profile: bool
    profile_ranks: list[int]
    profile_step_end: int
    profile_step_start: int
    prompt_data: str | None
    prompt_data_weights: list[float] | None
    q_lora_rank: int | None
    qk_head_dim: int | None
    qk_layernorm: bool
    qk_pos_emb_head_dim: int | None
    ray_address: str
    recompute_granularity: Literal["full", "selective"] | None
    recompute_method: Literal["uniform", "block"] | None
    recompute_num_layers: int | None
    ref_ckpt_step: int | None
    ref_load: str | None
    ref_served_model: str | None
    ref_update_interval: int | None
    rejected_key: str
    reward_key: str | None
    reward_num_workers: int | None
    reward_timeout: float
    rewards_normalization: bool
    rm_type: str | None
    rm_url: str | None
    rollout_all_samples_process_path: str | None
    rollout_backend: str
    rollout_batch_size: int
    rollout_data_postprocess_path: str | None
    rollout_external_engine_addrs: list[str] | None
    rollout_function_path: str
    rollout_global_dataset: bool
    rollout_max_context_len: int | None
    rollout_max_prompt_len: int | None
    rollout_max_response_len: int | None
    rollout_num_engines: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int
    rollout_sample_filter_path: str | None
    rollout_sample_hook_path: list[str]
    rollout_seed: int
    rollout_shuffle: bool
    rollout_skip_special_tokens: bool
    rollout_stop: list[str] | None
    rollout_stop_token_ids: list[int] | None
    rollout_temperature: float
    rollout_timeout: float
    rollout_top_k: int
    rollout_top_p: float
    rotary_base: float | None
    rotary_percent: float | None
    rotary_scaling_factor: float | None
    router_overrides: dict[str, list[str]]
    rs_level: Literal["token", "sequence", "geometric"]
    rs_lower_bound: float
    rs_upper_bound: float
    rs_veto_threshold: float | None
    run_dir: str
    sapo_tau_neg: float
    sapo_tau_pos: float
    save: str | None
    save_debug_rollout_data: str | None
    save_debug_train_data: str | None
    save_hf: str | None
    save_hf_as: Literal["merged", "adapter"]
    save_interval: int | None
    seed: int
    seq_length: int | None
    sequence_parallel: bool
    skip_bad_rows: bool
    skip_eval_before_train: bool
    skip_failed_groups: bool
    spec: str | None
    stale_groups: Literal["drop", "requeue"]
    start_rollout_id: int | None
    swiglu: bool
    sync_timeout: float
    sync_tolerance: float | None
    tensor_model_parallel_size: int
    tis_batch_normalize: bool
    tis_clip: float
    tis_clip_low: float
    tis_level: Literal["token", "sequence", "geometric"]
    tis_lower_bound: float
    tis_mode: Literal["truncate", "clip", "mask"]
    tis_upper_bound: float
    tool_key: str
    topology_num_gpus: int
    train_backend: str
    train_timeout: float
    trust_remote_code: bool
    unsafe_local_exec: bool
    untie_embeddings_and_output_weights: bool
    update_weight_buffer_size: int
    update_weights_interval: int
    use_distributed_optimizer: bool
    use_dynamic_batch_size: bool
    use_kl_loss: bool
    use_opd: bool
    use_opsm: bool
    use_rollout_logprobs: bool
    use_rollout_routing_replay: bool
    use_rotary_position_embeddings: bool
    use_routing_replay: bool
    use_rs: bool
    use_tensorboard: bool
    use_tis: bool
    use_unbiased_kl: bool
    use_wandb: bool
    v_head_dim: int | None
    value_clip: float
    vllm_config: str | None
    vllm_config_path: str | None
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    vllm_max_model_len: int | None
    vllm_max_num_seqs: int | None
    vllm_overrides: dict[str, list[str]]
    vllm_router_ip: str | None
    vllm_router_port: int | None
    vllm_topology: Any
    vocab_size: int | None
    wandb_dir: str | None
    wandb_group: str | None
    wandb_host: str | None
    wandb_key: str | None
    wandb_mode: Literal["online", "offline", "disabled"] | None
    wandb_project: str | None
    wandb_run_id: str | None
    wandb_team: str | None
    weight_decay: float
    weight_sync: Literal["auto", "ipc", "shm", "single-copy", "disk", "nccl", "lora", "restart"]
    worker_start_timeout: float
    world_size: int

class HookSettings(Settings):
    vllm_router_ip: str
    vllm_router_port: int
    vllm_model_routers: dict[str, tuple[str, int]]
    rollout_engine_urls: list[str]
    rollout_engine_kind: str
    vllm_model_engine_urls: dict[str, list[str]]
    num_rollout: int
    sglang_router_ip: str
    sglang_router_port: int
    sglang_model_routers: dict[str, tuple[str, int]]
