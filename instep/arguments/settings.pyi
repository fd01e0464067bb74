# Made by `python scripts/docs/args_stub.py`; do not edit.
from typing import Any, Literal

from instep.data.formats import EvalDataset

class Common:
    command: Literal["train", "train-async", "sft", "dpo", "serve"]
    planned: bool

class ModelSettings(Common):
    async_save: bool
    chat_template: str | None
    chat_template_text: str | None
    ckpt_format: Literal["torch_dist", "torch"]
    ckpt_step: int | None
    config: str | None
    dump_config: str | None
    enable_mtp_training: bool
    finetune: bool
    freeze_params_name_list: list[str] | None
    hf_checkpoint: str
    load: str | None
    mtp_loss_scaling_factor: float
    mtp_num_layers: int
    no_load_optim: bool
    no_save_optim: bool
    only_train_params_name_list: list[str] | None
    ref_ckpt_step: int | None
    ref_load: str | None
    save: str | None
    save_hf: str | None
    save_interval: int | None
    start_rollout_id: int | None
    train_backend: str
    trust_remote_code: bool

class DataSettings(Common):
    add_bos_token: bool
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    balance_by_flops: bool
    balance_data: bool
    chosen_key: str
    data_cache_path: str | None
    data_source_path: str
    global_batch_size: int
    input_key: str
    label_key: str | None
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"]
    max_tokens_per_gpu: int | None
    metadata_key: str
    micro_batch_size: int
    n_samples_per_prompt: int
    num_epoch: int | None
    num_rollout: int | None
    num_steps_per_rollout: int
    prompt_data: str | None
    prompt_data_weights: list[float] | None
    rejected_key: str
    rollout_batch_size: int
    rollout_global_dataset: bool
    rollout_seed: int
    rollout_shuffle: bool
    skip_bad_rows: bool
    tool_key: str
    use_dynamic_batch_size: bool

class RolloutSettings(Common):
    buffer_filter_path: str | None
    custom_convert_samples_to_train_data_path: str | None
    custom_eval_rollout_log_function_path: str | None
    custom_generate_function_path: str | None
    custom_rollout_log_function_path: str | None
    dynamic_sampling_filter_path: str | None
    mask_offpolicy_in_partial_rollout: bool
    over_sampling_batch_size: int
    partial_rollout: bool
    rollout_all_samples_process_path: str | None
    rollout_data_postprocess_path: str | None
    rollout_function_path: str
    rollout_max_context_len: int | None
    rollout_max_prompt_len: int | None
    rollout_max_response_len: int | None
    rollout_sample_filter_path: str | None
    rollout_sample_hook_path: list[str]
    rollout_skip_special_tokens: bool
    rollout_stop: list[str] | None
    rollout_stop_token_ids: list[int] | None
    rollout_temperature: float
    rollout_top_k: int
    rollout_top_p: float
    unsafe_local_exec: bool

class RewardSettings(Common):
    custom_reward_post_process_path: str | None
    custom_rm_path: str | None
    eval_reward_key: str | None
    group_rm: bool
    reward_key: str | None
    reward_num_workers: int | None
    rm_type: str | None
    rm_url: str | None
    skip_failed_groups: bool

class EvalSettings(Common):
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
    eval_temperature: float | None
    eval_tool_key: str | None
    eval_top_k: int | None
    eval_top_p: float | None
    n_samples_per_eval_prompt: int
    skip_eval_before_train: bool

class AlgorithmSettings(Common):
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
    calculate_per_token_loss: bool
    constant_loss_length: int | None
    critic_load: str | None
    critic_lr: float | None
    critic_lr_warmup_iters: int
    critic_num_gpus_per_node: int | None
    critic_num_nodes: int | None
    critic_save: str | None
    custom_advantage_function_path: str | None
    custom_loss_function_path: str | None
    custom_pg_loss_reducer_function_path: str | None
    custom_tis_function_path: str | None
    dpo_beta: float
    dpo_label_smoothing: float
    entropy_coef: float
    eps_clip: float
    eps_clip_c: float | None
    eps_clip_high: float
    gamma: float
    grpo_std_normalization: bool
    gspo_gradient: Literal["token", "sequence"]
    kl_coef: float
    kl_loss_coef: float
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"]
    lambd: float
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"]
    megatron_config_path: str | None
    normalize_advantages: bool
    num_critic_only_steps: int
    opd_kl_coef: float
    opd_teacher_ckpt_step: int | None
    opd_teacher_load: str | None
    opd_teacher_url: str | None
    opd_type: str | None
    opsm_delta: float
    overlong_buffer_len: int | None
    overlong_penalty_factor: float
    ref_served_model: str | None
    ref_update_interval: int | None
    rewards_normalization: bool
    rs_level: Literal["token", "sequence", "geometric"]
    rs_lower_bound: float
    rs_upper_bound: float
    rs_veto_threshold: float | None
    sapo_tau_neg: float
    sapo_tau_pos: float
    tis_batch_normalize: bool
    tis_clip: float
    tis_clip_low: float
    tis_level: Literal["token", "sequence", "geometric"]
    tis_lower_bound: float
    tis_mode: Literal["truncate", "clip", "mask"]
    tis_upper_bound: float
    use_kl_loss: bool
    use_opd: bool
    use_opsm: bool
    use_rollout_logprobs: bool
    use_rollout_routing_replay: bool
    use_routing_replay: bool
    use_rs: bool
    use_tis: bool
    use_unbiased_kl: bool
    value_clip: float

class OptimizerSettings(Common):
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    lr: float
    lr_decay_iters: int | None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_warmup_iters: int
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"]
    min_lr: float
    optimizer: Literal["adam", "adamw_8bit"]
    optimizer_cpu_offload: bool
    weight_decay: float

class LoraSettings(Common):
    lora_alpha: int | None
    lora_dropout: float
    lora_rank: int
    lora_target_modules: list[str] | None
    save_hf_as: Literal["merged", "adapter"]

class AsyncSettings(Common):
    max_staleness: int | None
    stale_groups: Literal["drop", "requeue"]
    update_weights_interval: int

class ClusterSettings(Common):
    actor_num_gpus_per_node: int
    actor_num_nodes: int
    bf16: bool
    cluster: str
    colocate: bool
    controller_memory_limit: float | None
    deterministic_mode: bool
    device: Literal["auto", "cpu", "cuda"]
    gpu_memory_gb: float
    no_offload_rollout: bool
    no_offload_train: bool
    no_torch_compile: bool
    notes: list[str]
    num_gpus_per_node: int
    num_threads: int | None
    offload: bool
    offload_rollout: bool
    offload_train: bool
    precision: str
    ray_address: str
    rollout_num_engines: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int
    run_dir: str
    seed: int
    topology_num_gpus: int
    world_size: int

class EngineSettings(Common):
    allowed_hosts: list[str] | None
    api_key_file: str | None
    dp_size: int
    engine_port: int | None
    no_api_key: bool
    no_fast_log_probs: bool
    on_gap: Literal["stop", "warn"]
    pause_mode: str
    port: int
    prefill_num_servers: int | None
    rollout_backend: str
    rollout_external_engine_addrs: list[str] | None
    router_overrides: dict[str, list[str]]
    sglang_enable_ep_moe: bool
    sglang_flags: list[str]
    sglang_overrides: dict[str, list[str]]
    sglang_server_concurrency: int | None
    sync_tolerance: float | None
    update_weight_buffer_size: int
    vllm_config: str | None
    vllm_config_path: str | None
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    vllm_max_model_len: int | None
    vllm_max_num_seqs: int | None
    vllm_overrides: dict[str, list[str]]
    vllm_router_ip: str | None
    vllm_router_port: int | None
    vllm_topology: Any
    weight_sync: Literal["auto", "ipc", "shm", "single-copy", "disk", "nccl", "lora", "restart"]

class ParallelSettings(Common):
    context_parallel_size: int
    custom_megatron_before_log_prob_hook_path: str | None
    custom_megatron_before_train_step_hook_path: str | None
    custom_megatron_init_path: str | None
    custom_model_provider_path: str | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    moe_aux_loss_coeff: float
    moe_grouped_gemm: bool
    moe_router_bias_update_rate: float
    moe_router_dtype: Literal["fp32", "fp64"] | None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] | None
    moe_z_loss_coeff: float | None
    num_layers_per_virtual_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    pipeline_model_parallel_size: int
    recompute_granularity: Literal["full", "selective"] | None
    recompute_method: Literal["uniform", "block"] | None
    recompute_num_layers: int | None
    sequence_parallel: bool
    spec: str | None
    tensor_model_parallel_size: int
    use_distributed_optimizer: bool

class ShapeSettings(Common):
    add_qkv_bias: bool
    apply_layernorm_1p: bool
    attention_dropout: float
    attention_output_gate: bool
    disable_bias_linear: bool | None
    ffn_hidden_size: int | None
    group_query_attention: bool
    hidden_dropout: float
    hidden_size: int | None
    kv_channels: int | None
    kv_lora_rank: int | None
    make_vocab_size_divisible_by: int
    max_position_embeddings: int | None
    moe_ffn_hidden_size: int | None
    moe_layer_freq: str | None
    moe_router_enable_expert_bias: bool
    moe_router_group_topk: int | None
    moe_router_num_groups: int | None
    moe_router_pre_softmax: bool
    moe_router_score_function: Literal["softmax", "sigmoid"] | None
    moe_router_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_shared_expert_gate: bool
    moe_shared_expert_intermediate_size: int | None
    mscale: float | None
    mscale_all_dim: float | None
    multi_latent_attention: bool
    norm_epsilon: float | None
    normalization: Literal["LayerNorm", "RMSNorm"] | None
    num_attention_heads: int | None
    num_experts: int | None
    num_layers: int | None
    num_query_groups: int | None
    position_embedding_type: Literal["rope"] | None
    q_lora_rank: int | None
    qk_head_dim: int | None
    qk_layernorm: bool
    qk_pos_emb_head_dim: int | None
    rotary_base: float | None
    rotary_percent: float | None
    rotary_scaling_factor: float | None
    seq_length: int | None
    swiglu: bool
    untie_embeddings_and_output_weights: bool
    use_rotary_position_embeddings: bool
    v_head_dim: int | None
    vocab_size: int | None

class LoggingSettings(Common):
    log_passrate: bool
    num_logged_samples: int
    trackio_project: str
    trackio_run_name: str | None
    trackio_server_url: str | None
    use_tensorboard: bool
    use_trackio: bool
    use_wandb: bool
    wandb_dir: str | None
    wandb_group: str | None
    wandb_host: str | None
    wandb_key: str | None
    wandb_mode: Literal["online", "offline", "disabled"] | None
    wandb_project: str | None
    wandb_run_id: str | None
    wandb_team: str | None

class TimeoutSettings(Common):
    engine_start_timeout: float
    heartbeat_timeout: float
    reward_timeout: float
    rollout_timeout: float
    sync_timeout: float
    train_timeout: float
    worker_start_timeout: float

class DebugSettings(Common):
    alarm_effective_sample_ratio: float
    alarm_entropy_fraction: float
    alarm_gap: float
    alarm_truncated_ratio: float
    alarm_zero_std_ratio: float
    debug_rollout_only: bool
    debug_train_only: bool
    dump_details: str | None
    hook_trial: bool
    load_debug_rollout_data: str | None
    load_debug_rollout_data_subsample: float | None
    profile: bool
    profile_ranks: list[int]
    profile_step_end: int
    profile_step_start: int
    save_debug_rollout_data: str | None
    save_debug_train_data: str | None

class Settings(
    ModelSettings,
    DataSettings,
    RolloutSettings,
    RewardSettings,
    EvalSettings,
    AlgorithmSettings,
    OptimizerSettings,
    LoraSettings,
    AsyncSettings,
    ClusterSettings,
    EngineSettings,
    ParallelSettings,
    ShapeSettings,
    LoggingSettings,
    TimeoutSettings,
    DebugSettings,
):
    atropos_timeout: float
    atropos_url: str
    env: str | None
    env_address: str | None
    env_args: dict[str, Any]
    env_eval_args: dict[str, Any] | None
    env_num_servers: int
    env_python: str | None
    env_renderer: str | None
    extra_flags: list[str]
    megatron_config: dict[str, dict[str, Any]]
    megatron_overrides: dict[str, Any]

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
