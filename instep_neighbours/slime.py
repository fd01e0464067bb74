"""What users' functions import from slime and vime, or name in a flag, and where it is here."""

from __future__ import annotations

# The module there, the module here, and what of it there is.
SLIME: dict[str, tuple[str, str]] = {
    "slime.utils.types": ("instep.types", "Sample"),
    "slime.rollout.base_types": ("instep.types", "RolloutFnTrainOutput RolloutFnEvalOutput"),
    "slime.utils.http_utils": ("instep.rollout.http", "post get"),
    "slime.utils.misc": ("instep.hooks", "load_function"),
    "slime.rollout.sglang_rollout": (
        "instep.rollout.vllm_rollout",
        "generate_rollout generate get_model_url GenerateState",
    ),
    "vime.rollout.vllm_rollout": (
        "instep.rollout.vllm_rollout",
        "generate_rollout generate get_model_url GenerateState",
    ),
    "slime.rollout.rm_hub": ("instep.rollout.rm_hub", "async_rm batched_async_rm grade_answer_verl"),
    "slime.rollout.rm_hub.math_utils": ("instep.rollout.rm_hub.math_utils", "extract_answer grade_answer_verl"),
    "slime.rollout.rm_hub.math_dapo_utils": ("instep.rollout.rm_hub.math_dapo_utils", "compute_score"),
    "slime.rollout.sft_rollout": ("instep.rollout.sft_rollout", "generate_rollout"),
    "slime.rollout.filter_hub.base_types": ("instep.rollout.filters", "DynamicFilterOutput"),
    "slime.rollout.filter_hub.dynamic_sampling_filters": (
        "instep.rollout.filters",
        "check_reward_nonzero_std check_reward_nonzero_std_with_fallback",
    ),
    "slime.rollout.data_source": ("instep.data.source", "RolloutDataSourceWithBuffer"),
    "slime.backends.megatron_utils.cp_utils": (
        "instep.training.slime_api",
        "all_gather_with_cp slice_log_prob_with_cp",
    ),
    "slime.backends.megatron_utils.loss": ("instep.training.slime_api", "get_log_probs_and_entropy"),
}

MODULES = {name.replace("slime.", "vime.", 1): here for name, here in SLIME.items()} | SLIME
