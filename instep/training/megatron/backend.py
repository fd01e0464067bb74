"""The `megatron` train backend: Megatron-Core's GPTModel over TP, SP, PP and DP, on CUDA (nccl) or a CPU (gloo).

Precision: with bfloat16, gradients are added up and reduced in float32, masters and moments are float32; with float32
everything is. Gradients are clipped by their global norm, then AdamW (decoupled weight decay; none on biases and
one-dimensional parameters) steps the masters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import ConfigError, InstepError
from instep.models.shape import model_shape
from instep.training.backend import LossFn, LossOutput, ParallelInfo, Role, StepResult, TokenOutputs
from instep.training.megatron import cpu_platform, upstream_fixes
from instep.training.megatron.checks import check_arguments, padded_vocab_size
from instep.training.megatron.offload import HostPool
from instep.training.megatron.weights import MegatronWeightSource, Placement, load_hf, local_parameters
from instep.types import TokenBatch

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


class MegatronBackend:
    """A `TrainBackend` over Megatron-Core. The caller has initialised `torch.distributed`, with gloo or nccl.

    Args:
        hf_config: the configuration of a dense qwen3, qwen2 or llama. Weights are random until `load_hf` or `load`.
        device: this rank's device; with the CPU, stand-ins for torch.cuda are put into this process.
        dtype: of the model and of the weights that it serves: torch.float32 or torch.bfloat16.
        with_optimizer: False for a model that only scores (a reference).

    Raises:
        ConfigError: a model or a layout that this backend does not have.
    """

    is_adapter = False

    def __init__(
        self,
        args: Settings,
        *,
        hf_config: Any,
        device: torch.device,
        dtype: torch.dtype,
        with_optimizer: bool = True,
        role: Role = "actor",
    ):
        self.args, self.dtype, self.shape = args, dtype, model_shape(hf_config)
        check_arguments(args, self.shape, dist.get_world_size())
        if role == "critic":
            self.shape = self.shape.as_critic()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            cpu_platform.install()
        upstream_fixes.apply()
        from instep.training.megatron import config, spec

        self.config, ddp_config, optimizer_config = config.configs(args, self.shape, device, dtype)
        self.padded_vocab = padded_vocab_size(self.shape.vocab_size, args)
        self.placement, self.parallel = _initialise_parallel(args, self.shape.num_layers, device)
        self.rope = spec.Rope(hf_config, self.shape.kv_channels, device)
        with cpu_platform.scope():
            self.model = spec.PolicyModel(
                self.config,
                padded_vocab=self.padded_vocab,
                vocab_size=self.shape.vocab_size,
                value_head=self.shape.value_head,
                max_sequence_length=self.shape.max_position_embeddings,
                pre_process=self.placement.pp_rank == 0,
                post_process=self.parallel.is_last_stage,
                share_embeddings_and_output_weights=self.shape.tied,
            )
            self.model.to(device)
            self.wrapped, self.optimizer = self._wrap(ddp_config, optimizer_config, with_optimizer)
        self._has_gradients = False
        self._host = HostPool()

    def _wrap(self, ddp_config: Any, optimizer_config: Any, with_optimizer: bool) -> tuple[Any, Any]:
        """The model, wrapped for bfloat16 and for data parallelism, and its optimizer."""
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        wrapped = Float16Module(self.config, self.model) if self.dtype is torch.bfloat16 else self.model
        if not with_optimizer:
            self.model.requires_grad_(False)
            return wrapped, None
        wrapped = DistributedDataParallel(self.config, ddp_config, wrapped)
        wrapped.broadcast_params()
        # Megatron would divide the gradients by a number of tokens here; the loss weights already contain it.
        self.config.finalize_model_grads_func = lambda model, num_tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )
        self.config.no_sync_func = wrapped.no_sync
        return wrapped, get_megatron_optimizer(optimizer_config, [wrapped], use_gloo_process_groups=False)

    # Scoring and gradients

    def forward_only(self, micro_batches: Sequence[TokenBatch], *, entropy: bool = False) -> list[TokenOutputs] | None:
        def keep(batch: TokenBatch, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
            return outputs.log_probs.sum(), outputs.cpu()

        self.wrapped.eval()
        with torch.no_grad():
            results = self._run(micro_batches, keep, entropy=entropy, forward_only=True)
        self.wrapped.train()
        return results

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, logits: bool = False
    ) -> list[LossOutput] | None:
        if self.optimizer is None:
            raise InstepError("forward_backward on a model without an optimizer")
        if self._has_gradients:
            raise InstepError(
                "forward_backward was called twice before optimizer_step",
                remedy="hand over all micro-batches of a step in one call: gradients are reduced at its end",
            )
        self._has_gradients = True

        def compute(batch: TokenBatch, outputs: TokenOutputs) -> tuple[Tensor, LossOutput]:
            out = loss_fn(batch, outputs)
            return out.loss, LossOutput(out.loss.detach().clone(), out.sums, out.maxes)

        return self._run(micro_batches, compute, entropy=True, logits=logits, forward_only=False)

    def _run(
        self,
        micro_batches: Sequence[TokenBatch],
        last: Callable[..., Any],
        *,
        entropy: bool,
        forward_only: bool,
        logits: bool = False,
    ) -> list[Any] | None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from instep.training.megatron import spec

        if not micro_batches:
            return [] if self.parallel.is_last_stage else None
        device = self.parallel.device
        multiple = self.placement.tp_size if self.config.sequence_parallel else 1

        def forward_step(iterator: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[Any, Any]:
            batch = next(iterator).to(device)
            packed = spec.pack(
                batch, self.rope, dtype=self.dtype, multiple=multiple, with_entropy=entropy, with_logits=logits
            )
            kwargs = {"fp32_output": False} if self.dtype is torch.bfloat16 else {}
            output = model(packed.tokens, None, None, packed_seq_params=packed, **kwargs)
            return output, functools.partial(loss, batch)

        def loss(batch: TokenBatch, output: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Any]:
            value, result = last(batch, TokenOutputs(*output))
            return value, torch.zeros((), dtype=torch.int, device=device), result

        with cpu_platform.scope():
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=[self.wrapped],
                num_microbatches=len(micro_batches),
                seq_length=1,  # each micro-batch announces its own
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results if self.parallel.is_last_stage else None

    def optimizer_step(self, lr: float) -> StepResult:
        if self.optimizer is None:
            raise InstepError("optimizer_step on a model without an optimizer")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.args.weight_decay * group["wd_mult"]
        with cpu_platform.scope():
            self.optimizer.prepare_grads()
            norm = self._grad_norm()
            skipped = not math.isfinite(norm)
            if not skipped:
                if self.args.clip_grad and norm > self.args.clip_grad:
                    scale = self.args.clip_grad / (norm + 1e-6)
                    torch._foreach_mul_(self._grads(), scale)
                self.optimizer.step_with_ready_grads()
            self._zero_grad()
        return StepResult(norm, skipped)

    def _grads(self) -> list[Tensor]:
        params = [p for opt in self.optimizer.chained_optimizers for p in opt.get_parameters()]
        return [p.grad for p in params if p.grad is not None]

    def _grad_norm(self) -> float:
        """The norm over the whole model, in which a parameter that several ranks hold counts once."""
        squares = torch.zeros((), device=self.parallel.device)
        for opt in self.optimizer.chained_optimizers:
            grads = opt.get_main_grads_for_grad_norm()
            if grads:
                squares += torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(squares, group=self.optimizer.get_grad_stats_parallel_group())
        return float(squares.sqrt())

    def _zero_grad(self) -> None:
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._has_gradients = False

    # Weights and checkpoints

    def remark(self) -> str:
        return ""

    def publish(self, version: str) -> None:
        """No-op: `weight_source` reads the live parameters."""

    def weight_source(self, *, adapter: bool = False) -> MegatronWeightSource:
        assert not adapter, "adapters are trained by the hf backend"
        parameters = local_parameters(self.model, self.placement)
        return MegatronWeightSource(self.shape, self.placement, parameters, self.dtype, self.parallel.device)

    def export_adapter(self, path: Path) -> None:
        raise NotImplementedError("adapters are trained by the hf backend")

    def earlier(self, path: Path) -> None:
        return None

    def load_hf(self, path: Path) -> None:
        parameters = local_parameters(self.model, self.placement)
        load_hf(Path(path), self.shape, self.placement, parameters, self.padded_vocab)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def save(self, path: Path) -> None:
        from instep.training.megatron import checkpoint

        with cpu_platform.scope():
            checkpoint.save(Path(path), self.model, None if self.args.no_save_optim else self.optimizer)

    def load(self, path: Path, *, optimizer: bool = True, fresh_head: bool = False) -> None:
        from instep.training.megatron import checkpoint

        with cpu_platform.scope():
            checkpoint.load(Path(path), self.model, self.optimizer if optimizer else None, fresh_head=fresh_head)
        if self.optimizer is not None and not optimizer:
            self.optimizer.reload_model_params()

    def offload(self) -> None:
        """Move model and optimizer to host memory and drop the gradients; no-op on a CPU or if already done."""
        if self.parallel.device.type != "cuda":
            return
        keep: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        drop: list[Tensor] = []
        if self.optimizer is not None:
            from instep.training.megatron import checkpoint

            for master in checkpoint.masters(self.optimizer).values():
                keep += [master.tensor, *(v for v in master.state.values() if isinstance(v, Tensor))]
            drop += [buffer.grad_data for buffer in self.wrapped.buffers]
        self._host.take(keep, drop)

    def onload(self) -> None:
        self._host.give_back()


def _initialise_parallel(args: Settings, num_layers: int, device: torch.device) -> tuple[Placement, ParallelInfo]:
    """Make Megatron's process groups, once per process for all its models; the place of this rank in them."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel(*sizes, create_gloo_process_groups=False)
    now = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    if now != sizes:
        raise ConfigError(
            f"two models of one process want different tensor and pipeline parallel sizes: {now} and {sizes}",
            remedy="use the same sizes for all models of a worker",
            where="--tensor-model-parallel-size and --pipeline-model-parallel-size",
        )
    torch.manual_seed(args.seed)
    with cpu_platform.scope():
        model_parallel_cuda_manual_seed(args.seed)
    placement = Placement(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=sizes[0],
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=sizes[1],
        dp_rank=ps.get_data_parallel_rank(),
        tp_group=ps.get_tensor_model_parallel_group(),
        pp_group=ps.get_pipeline_model_parallel_group(),
        num_layers=num_layers,
    )
    last = placement.pp_rank == placement.pp_size - 1
    parallel = ParallelInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=placement.dp_rank,
        dp_size=ps.get_data_parallel_world_size(),
        tp_size=sizes[0],
        pp_size=sizes[1],
        is_last_stage=last,
        is_output_rank=last and placement.tp_rank == 0,
        dp_group=ps.get_data_parallel_group(),
        device=device,
    )
    return placement, parallel
