"""The protocol between the backend-neutral worker and a train backend. Each process (rank) has one backend.

A loss gets the log-probs and the entropy of response tokens (logits only if a user's own loss needs them). So no
backend needs its own losses. Gradients are *summed* over micro-batches and data-parallel ranks. The loss weighs each
token with the denominators of the whole optimizer step (`TokenBatch.token_columns["loss_weights"]`). So nothing depends
on the layout of micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from instep.training.saving import Saver
from instep.types import TokenBatch
from instep.weights.source import WeightSource


@dataclass
class ParallelInfo:
    """The place of this process among the ranks of its role."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1  # ranks that share the tokens of each micro-batch
    micro_batch_multiple: int = 1  # the number of micro-batches of a step is a multiple of it
    is_last_stage: bool = True  # holds log-probs and losses
    is_output_rank: bool = True  # the one rank of this DP rank that returns results to the controller
    dp_group: Any = None
    device: torch.device = torch.device("cpu")


@dataclass
class TokenOutputs:
    """The model's outputs for the response tokens of a micro-batch, samples in order; on the last pipeline stage.

    Attributes:
        log_probs: float32 `[num_response_tokens]`, of each response token at the temperature of its sample
            (`sample_columns["temperature"]`), without padded vocabulary columns. Empty for a critic.
        entropy: float32 `[num_response_tokens]` of the same distribution, or None if not requested.
        logits: float32 `[1, num_tokens, vocab_size]` of the whole stream before the temperature, with gradient; only if
            a custom loss reads them, because they take much memory.
        values: float32 `[num_response_tokens]`, only of a critic: the value of the state in which the token was chosen.
        drafts: float32 `[layers, num_response_tokens]`, only where layers of multi-token prediction are trained: the
            log-prob of each response token by each of them.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    values: torch.Tensor | None = None
    drafts: torch.Tensor | None = None

    def cpu(self) -> TokenOutputs:
        """Return a copy in host memory, in float32."""
        columns = (self.log_probs, self.entropy, self.logits, self.values)
        return TokenOutputs(*(None if x is None else x.float().cpu() for x in columns))


@dataclass
class LossOutput:
    """What a loss returns for one micro-batch: the scalar to differentiate, and detached metrics.

    The worker adds up `sums` over micro-batches and data-parallel ranks, and takes the maximum of `maxes`.
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


class Frozen(Protocol):
    """A model that only scores: a reference or a teacher. Each `TrainBackend` is one.

    Attributes:
        is_adapter: it is the actor with another adapter, and `load_hf` reads an adapter in peft's format.
    """

    is_adapter: bool

    def forward_only(self, micro_batches: Sequence[TokenBatch], *, entropy: bool = False) -> list[TokenOutputs] | None:
        """Return outputs of each micro-batch without gradients, in order, on the CPU; None except on the last stage."""

    def load_hf(self, path: Path) -> None:
        """Load weights from a Hugging Face checkpoint into the model (and the optimizer's masters).

        A critic's output layer becomes zero: its first values are 0, whatever the layout.
        """

    def offload(self, *, weights: bool = True) -> None:
        """Free the device's memory: gradients are dropped, everything else goes to the host (`parking.py`).

        Args:
            weights: False starts to copy masters and moments to the host; the weights stay until a call with True.
        """

    def onload(self, *, optimizer: bool = True) -> None:
        """Undo `offload`; without `optimizer`, only for the weights."""


class TrainBackend(Frozen, Protocol):
    """The interface of a train backend for `training/worker.py`. All ranks call every method in the same order.

    Both backends call `loss_fn` once per micro-batch, in the order of `micro_batches`; so the worker knows the samples
    of a call. `hf` loops over them. Megatron's schedules (0.16: no pipelining, 1F1B with and without interleaving) run
    the forward passes of a stage's last chunk in that order. The order of other chunks and of backward passes may
    differ. The loss belongs to the forward pass of the last stage, on each of its tensor- and context-parallel ranks.
    Activation recomputation repeats layers and the output layer, never the loss.

    A critic has an output layer of one row, without bias. It returns `TokenOutputs.values` instead of log-probs.

    Attributes:
        left_out: a line about weights of the source that were not read; otherwise empty.
    """

    parallel: ParallelInfo
    left_out: str
    saver: Saver  # used by `save`

    @property
    def embedding(self) -> torch.nn.Module | None:
        """The layer that turns tokens into vectors; None on a rank without it."""

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, logits: bool = False, more: bool = False
    ) -> list[LossOutput] | None:
        """Compute the gradients of all micro-batches of an optimizer step, summed over data-parallel ranks.

        Args:
            loss_fn: called once per micro-batch, in order, on the ranks of the last pipeline stage.
            logits: whether `loss_fn` reads `TokenOutputs.logits`.
            more: another call with micro-batches of the same step follows; the last call is without `more`.

        Returns:
            The results of `loss_fn`, in the same order; None except on the last stage.
        """

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of earlier calls with `more` for the next step; 0 drops them, NaN too."""

    def optimizer_step(self, lr: float) -> StepResult:
        """Clip the gradients, step with learning rate `lr`, zero the gradients. A non-finite norm skips the step."""

    def remark(self) -> str:
        """Return lines for the user: a slower mode in which this model trains, and `left_out`; otherwise empty.
        Collective.

        Raises:
            ConfigError: the model cannot be trained.
        """

    def weight_source(self, *, adapter: bool = False) -> WeightSource:
        """Yield the weights that engines serve, with merged adapters; with `adapter`, only the adapter."""

    def export_adapter(self, path: Path) -> None:
        """Write the adapter, in float32 and peft's format, as the folder `path` (collective)."""

    def earlier(self, path: Path) -> Frozen | None:
        """Return the frozen model in `path` as this model with another adapter; None if it needs separate weights.

        Args:
            path: the base of this model's adapter, or a folder that `export_adapter` wrote.
        """

    def save(self, path: Path) -> None:
        """Write model and optimizer into the existing folder `path`, collectively; `saver.finish` follows."""

    def load(self, path: Path, *, optimizer: bool = True, fresh_head: bool = False) -> None:
        """Read what `save` wrote, also with another parallel layout.

        Args:
            optimizer: False keeps the optimizer's moments unchanged.
            fresh_head: the output layer becomes zero, for a critic that starts from an actor's weights.
        """
