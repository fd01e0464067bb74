"""The name of slime's `slime.rollout.sglang_rollout`, for users' functions."""

from __future__ import annotations

from instep.rollout.vllm_rollout import GenerateState, generate, generate_rollout, get_model_url

__all__ = ["GenerateState", "generate", "generate_rollout", "get_model_url"]
