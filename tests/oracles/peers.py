"""TRL's, verl's and peft's own functions as second oracles; `make test-peers` makes an environment that has them.

Nothing of their mathematics is stood in for: their modules are imported from the pinned wheels. What a trainer's method
needs around it (a model that answers with given log-probs, an accelerator of one process) is plumbing and given here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.losses import Response

VERSIONS = {"verl": "0.9.1", "trl": "1.16.0", "peft": "0.21.2"}


def load(name: str) -> ModuleType:
    """The module `name` of a peer, in the pinned version; the test is skipped where there is none."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: run `make test-peers`")
    found = importlib.metadata.version(package)
    assert found == VERSIONS[package], f"{package} {found} is installed, the comparison is with {VERSIONS[package]}"
    return importlib.import_module(name)


def core_algos() -> ModuleType:
    """verl's advantages, policy losses, KL estimators and value loss."""
    return load("verl.trainer.ppo.core_algos")


def verl_config(**values: Any) -> Any:
    """verl's `ActorConfig`, which its policy losses read."""
    return load("verl.workers.config").ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **values)


def padded(batch: list[Response], name: str, fill: float = 0.0) -> Tensor:
    """A column of `batch` as the peers want it: float64 `[num_samples, longest]`, padded on the right."""
    rows = [getattr(r, name) if isinstance(getattr(r, name), list) else [getattr(r, name)] * len(r.mask) for r in batch]
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], dtype=torch.float64)


def flat(column: Tensor, batch: list[Response]) -> Tensor:
    """`[num_samples, longest]` (or `[num_samples, 1]`) -> `[num_tokens]` without the padding."""
    column = column.expand(-1, max(len(r.mask) for r in batch))
    return torch.cat([row[: len(r.mask)] for row, r in zip(column, batch, strict=True)])


class _OneProcess:
    """What TRL's trainers ask of an accelerator."""

    num_processes, device, sync_gradients = 1, torch.device("cpu"), True

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x


def trl_grpo_loss(log_probs: Tensor, columns: dict[str, Tensor], **settings: Any) -> Tensor:
    """`GRPOTrainer._compute_loss` over given log-probs `[num_samples, longest]`, in training, without accumulation.

    Args:
        columns: `completion_mask`, `advantages`, `old_per_token_logps`, ...: the method's inputs besides token ids.
        settings: of `GRPOConfig`.
    """
    module = load("trl.trainer.grpo_trainer")
    config = load("trl").GRPOConfig(output_dir="unused", report_to="none", bf16=False, use_cpu=True, **settings)
    trainer = object.__new__(module.GRPOTrainer)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    vars(trainer).update(
        args=config,
        model=SimpleNamespace(training=True),
        accelerator=_OneProcess(),
        beta=config.beta,
        loss_type=config.loss_type,
        epsilon_low=config.epsilon,
        epsilon_high=high,
        importance_sampling_level=config.importance_sampling_level,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        top_entropy_quantile=1.0,
        use_vllm="importance_sampling_ratio" in columns,
        vllm_importance_sampling_correction="importance_sampling_ratio" in columns,
        max_completion_length=log_probs.shape[1],
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, log_probs.detach().exp(), None),
    )
    ids = torch.zeros(log_probs.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, **columns}
    inputs["num_items_in_batch"] = columns["completion_mask"].sum()
    return trainer._compute_loss(trainer.model, inputs)


def trl_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, **settings: Any
) -> Tensor:
    """`DPOTrainer._compute_loss` over responses of one token, whose log-probs `[num_pairs]` these are."""
    module = load("trl.trainer.dpo_trainer")
    config = load("trl").DPOConfig(output_dir="unused", report_to="none", bf16=False, use_cpu=True, **settings)

    class Model(torch.nn.Module):
        def forward(self, **_: Any) -> Any:
            rows = torch.cat([chosen, rejected])[:, None]
            metrics = {"entropy": rows.detach(), "mean_logits": rows.detach(), "is_top1": rows > 0}
            return SimpleNamespace(log_probs=rows, **metrics)

    trainer = object.__new__(module.DPOTrainer)
    vars(trainer).update(
        args=config,
        model=Model(),
        accelerator=_OneProcess(),
        beta=beta,
        label_smoothing=config.label_smoothing,
        loss_types=config.loss_type,
        loss_weights=[1.0] * len(config.loss_type),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        use_weighting=False,
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(2 * len(chosen), 2, dtype=torch.long)
    mask = torch.tensor([[0, 1]]).expand(len(ids), -1)
    inputs = {"input_ids": ids, "attention_mask": ids + 1, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    return trainer._compute_loss(trainer.model, inputs, return_outputs=False)
