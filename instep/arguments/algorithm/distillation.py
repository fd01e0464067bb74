"""On-policy distillation: defaults of the teacher's flags, and of the reward if a run names no reward."""

from __future__ import annotations

from instep.arguments.concern import Given, Settings
from instep.arguments.flag import http_address
from instep.arguments.model import folder_to_load
from instep.arguments.reward import row_names_reward

# The hooks of a run without a reward.
NO_REWARD, NO_REWARDS = "instep.rollout.teacher.no_reward", "instep.rollout.teacher.no_rewards"
_NAME_A_REWARD = ("rm_type", "custom_rm_path", "rollout_function_path", "custom_generate_function_path")


def opd_type(args: Settings, given: Given) -> str | None:
    """Return the kind of teacher, `engine` (slime: sglang) or `model` (slime: megatron)."""
    kind = args.opd_type
    kind = "engine" if kind == "sglang" else "model" if kind == "megatron" else kind
    return kind or (("engine" if args.opd_teacher_load is None else "model") if args.use_opd else None)


def opd_teacher_url(args: Settings, given: Given) -> str | None:
    """Return the teacher's address; by default that of `--rm-url`, unless it is a reward server."""
    if args.use_opd and args.opd_type == "engine" and args.opd_teacher_url is None and args.rm_url is not None:
        return None if (args.rm_type or "").endswith("remote_rm") else http_address(args.rm_url)
    return args.opd_teacher_url


def custom_rm_path(args: Settings, given: Given) -> str | None:
    return NO_REWARD if _teacher_is_enough(args, given) else args.custom_rm_path


def custom_reward_post_process_path(args: Settings, given: Given) -> str | None:
    return args.custom_reward_post_process_path or (NO_REWARDS if _teacher_is_enough(args, given) else None)


def _teacher_is_enough(args: Settings, given: Given) -> bool:
    """Return whether the run has a teacher and names no reward."""
    return args.use_opd and not any(name in given for name in _NAME_A_REWARD) and not row_names_reward(args)


RESOLVERS = (opd_type, opd_teacher_url, custom_rm_path, custom_reward_post_process_path)
RULES = (folder_to_load("opd_teacher_load"),)
