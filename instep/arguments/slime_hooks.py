"""What users' functions import from slime, or name in a flag, and where it is here.

vime's modules have the same names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The module there, the module here, and what of it there is.
MODULES: dict[str, tuple[str, str]] = {
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


_THEIRS = {name.replace("slime.", "vime.", 1): here for name, here in MODULES.items()} | MODULES


def instep_hook(path: str) -> str:
    """instep's function in the place of slime's or vime's at this dotted path; empty if there is none."""
    module, _, name = path.rpartition(".")
    ours, names = _THEIRS.get(module, ("", ""))
    return f"{ours}.{name}" if name in names.split() else ""


class _Aliases(MetaPathFinder, Loader):
    """Finds modules of slime and vime that are not installed; they hold instep's functions under the same names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = not path and any(f"{module}.".startswith(f"{name}.") for module in _THEIRS)  # a real package has a path
        return ModuleSpec(name, self, is_package=True) if ours else None

    def exec_module(self, module: ModuleType) -> None:
        ours, names = _THEIRS.get(module.__name__, ("", ""))
        for name in names.split():
            setattr(module, name, getattr(importlib.import_module(ours), name))


_ALIASES = _Aliases()


def install_aliases() -> None:
    """Let users' files import slime's and vime's modules."""
    if _ALIASES not in sys.meta_path:
        sys.meta_path.append(_ALIASES)


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.loader is not _ALIASES
