"""What slime's `slime.rollout.sglang_rollout` has for users' functions, under its name."""

from __future__ import annotations

from instep.rollout.vllm_rollout import GenerateState, generate, generate_rollout, get_model_url

__all__ = ["GenerateState", "generate", "generate_rollout", "get_model_url"]
