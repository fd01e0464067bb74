"""The thin protocol between the backend-neutral worker and a train backend (one object per process, SPMD).

All ranks call every method in the same order. A loss sees log-probs and entropy of response tokens (logits only where
a user's own loss asks for them), so that no backend grows a loss of its own. Gradients are *summed* over micro-batches
and data-parallel ranks: `loss_fn` weighs each token with the denominators of the whole optimizer step
(`TokenBatch.token_columns["loss_weights"]`), so that nothing depends on the layout of micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from instep.types import TokenBatch
from instep.weights.source import TensorSpec, WeightSource

__all__ = [
    "LossFn",
    "LossOutput",
    "ParallelInfo",
    "Role",
    "StepResult",
    "TensorSpec",
    "TokenOutputs",
    "TrainBackend",
    "WeightSource",
]


@dataclass
class ParallelInfo:
    """Where this process stands."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_size: int = 1
    pp_size: int = 1
    is_last_stage: bool = True  # holds log-probs and losses
    is_output_rank: bool = True  # the one rank of this DP rank that hands results to the controller
    dp_group: Any = None
    device: torch.device = torch.device("cpu")


@dataclass
class TokenOutputs:
    """Per response token of a micro-batch, samples in order, on the last pipeline stage.

    Attributes:
        log_probs: float32 `[num_response_tokens]`, of the token that stands there, at the sample's sampling
            temperature (`sample_columns["temperature"]`), padded vocabulary columns left out. Of a critic: empty.
        entropy: float32 `[num_response_tokens]` of the same distribution, or None if not asked for.
        logits: float32 `[1, num_tokens, vocab_size]` of the whole stream before the temperature, with gradient, if a
            custom loss asked for them; they are as large as they sound.
        values: float32 `[num_response_tokens]`, only of a critic: the value of the state in which the token was chosen.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def cpu(self) -> TokenOutputs:
        """The same in host memory, in float32."""
        columns = (self.log_probs, self.entropy, self.logits, self.values)
        return TokenOutputs(*(None if x is None else x.float().cpu() for x in columns))


@dataclass
class LossOutput:
    """What a loss returns for one micro-batch: the scalar to differentiate, and detached metrics.

    `sums` are added up over micro-batches and data-parallel ranks, `maxes` are maximised.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxes: dict[str, torch.Tensor] = field(default_factory=dict)


LossFn = Callable[[TokenBatch, TokenOutputs], LossOutput]


@dataclass
class StepResult:
    """One optimizer step: the gradient norm before clipping and whether the step was skipped (not finite)."""

    grad_norm: float
    skipped: bool = False


Role = Literal["actor", "critic"]


class TrainBackend(Protocol):
    """What a train backend offers to `training/worker.py`.

    In the role of a critic the output layer is one row, without bias: `TokenOutputs.values` instead of log-probs.
    """

    parallel: ParallelInfo

    def forward_only(self, micro_batches: Sequence[TokenBatch], *, entropy: bool = False) -> list[TokenOutputs] | None:
        """Log-probs (a critic: values) without gradients, one per micro-batch, on CPU; None but on the last stage."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, logits: bool = False
    ) -> list[LossOutput] | None:
        """Add the gradients of all micro-batches, summed over data-parallel ranks; None except on the last stage."""
        ...

    def optimizer_step(self, lr: float) -> StepResult:
        """Clip, step with learning rate `lr`, zero the gradients. A non-finite norm skips the step."""
        ...

    def publish(self, version: str) -> None:
        """Make the current weights those that `weight_source` yields. Nothing to do but for single copy."""
        ...

    def weight_source(self) -> WeightSource: ...

    def load_hf(self, path: Path) -> None:
        """Load weights of a Hugging Face checkpoint into the model (and the optimizer's masters).

        A critic's output layer becomes zero: its first values are 0, whatever the layout.
        """
        ...

    def save(self, path: Path) -> None:
        """Write model and optimizer into the existing folder `path`, collectively."""
        ...

    def load(self, path: Path, *, optimizer: bool = True, fresh_head: bool = False) -> None:
        """Read what `save` wrote, also under another parallel layout.

        Args:
            fresh_head: a critic takes an actor's weights, without its output layer; as with `load_hf`.
        """
        ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...
