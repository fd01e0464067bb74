"""The `megatron` train backend: Megatron-Core's GPTModel over TP, SP, PP, CP and DP, on CUDA (nccl) or a CPU (gloo).

Precision: with bfloat16, gradients are summed and reduced in float32, masters and moments are float32. With float32
everything is float32. Gradients are clipped by their global norm, then AdamW (decoupled weight decay, except for biases
and one-dimensional parameters) steps the masters.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.arguments.settings import Settings
from instep.checkpoints.adapter import Lora, check_layout
from instep.checkpoints.folder_names import FolderNames
from instep.models.mtp import left_out
from instep.models.shape import model_shape
from instep.models.weight_map import EMBEDDING, HEAD
from instep.training.backend import LossFn, LossOutput, Role, StepResult, TokenOutputs
from instep.training.lora import Earlier, base_for_all
from instep.training.megatron import clipping, cpu_platform, layout, upstream_fixes
from instep.training.megatron.checks import check_arguments, padded_vocab_size
from instep.training.megatron.hooks import MegatronHooks
from instep.training.megatron.moments import keep_moments_as_asked
from instep.training.megatron.replay import routes_of
from instep.training.megatron.weights import MegatronWeightSource, check_parameters, load_hf, local_parameters
from instep.training.own_choices import CHOSEN
from instep.training.saving import Saver
from instep.training.selection import Selection
from instep.types import TokenBatch
from instep.weights.parking import Parking, give_back, local_tensors

if TYPE_CHECKING:
    from instep.training.megatron.lora import MegatronLora


class MegatronBackend:
    """A `TrainBackend` over Megatron-Core. The caller has initialised `torch.distributed`, with gloo or nccl.

    Args:
        hf_config: of a family in `models/shape.py`. Weights are random until `load_hf` or `load`.
        device: this rank's device; for the CPU, this process gets replacements for torch.cuda.
        dtype: of the model and of the weights for the engines: torch.float32 or torch.bfloat16.
        with_optimizer: False for a model that only scores (a reference).
        lora: the adapter to train; then the weights are frozen, in `dtype`.
        selection: the weights to train, by Megatron's names, layers counted over all stages; None: all.
        hooks: the user's functions, for a trained model.

    Raises:
        ConfigError: this backend does not support the model or the layout.
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
        lora: Lora | None = None,
        selection: Selection | None = None,
        hooks: MegatronHooks | None = None,
    ):
        self.args, self.dtype, self.shape = args, dtype, model_shape(hf_config)
        check_arguments(args, self.shape)
        if role == "critic":
            self.shape = self.shape.as_critic()
        elif with_optimizer:  # a model that only scores needs no drafter
            self.shape = self.shape.with_mtp(args.mtp_num_layers)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            cpu_platform.install()
        upstream_fixes.apply()
        from instep.training.megatron import config
        from instep.training.megatron.rotary import Rope

        self.config, ddp_config, optimizer_config = config.configs(args, self.shape, device, dtype)
        self.padded_vocab = padded_vocab_size(self.shape.vocab_size, args)
        self.placement, self.parallel = layout.initialise(args, self.shape, device)
        if hooks is not None and with_optimizer:
            hooks.started()
        self.rope = Rope(hf_config, self.shape.rotary_dim, device)
        with cpu_platform.scope():
            self.chunks = [self._chunk(chunk, hooks).to(device) for chunk in range(self.placement.num_chunks)]
            named = local_parameters(self.chunks, self.placement)
            if hooks is not None and hooks.builders:
                check_parameters(named, self.shape, self.placement, hooks.builders)
            if selection is not None:
                named = {name: p for name, p in named.items() if isinstance(p, torch.nn.Parameter)}
                if self.shape.tied and HEAD in named:  # the copy in the last stage
                    named[EMBEDDING] = named.pop(HEAD)
                selection.apply(named)
            if (drafter := self.chunks[-1].drafter) is not None:
                drafter.trains = args.enable_mtp_training
                if not drafter.trains:
                    drafter.requires_grad_(False)
            self.adapter: MegatronLora | None = None
            self.wrapped, self.optimizer = self._wrap(ddp_config, optimizer_config, with_optimizer, lora)
        self.left_out, self._names = "", FolderNames.of(Path(args.hf_checkpoint))  # its index is long
        self.saver = Saver(device, args.async_save)
        self._weights = Parking(device, self._local_weights)
        self._states = Parking(device, self._optimizer_states, self._gradients)

    def _chunk(self, chunk: int, hooks: MegatronHooks | None) -> Any:
        """Build a chunk of the model, with random weights, by the user's provider if there is one."""
        from instep.training.megatron import spec

        def own(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> spec.PolicyModel:
            block = spec.block_spec(self.config, vp_stage, self.shape.experts.layers if self.shape.experts else ())
            if hooks is not None:
                block = hooks.layers(functools.partial(spec.users_block, block), self.config, vp_stage) or block
            return spec.PolicyModel(
                self.config,
                padded_vocab=self.padded_vocab,
                vocab_size=self.shape.vocab_size,
                value_head=self.shape.value_head,
                block=block,
                max_sequence_length=self.shape.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                share_embeddings_and_output_weights=self.shape.tied,
                num_mtp_layers=self.shape.mtp,
                vp_stage=vp_stage,
            )

        ends = self.placement.begins(chunk), self.placement.ends(chunk)
        vp_stage = chunk if self.placement.num_chunks > 1 else None
        return own(*ends, vp_stage) if hooks is None else hooks.build(spec.PolicyModel, own, *ends, vp_stage)

    def _wrap(
        self, ddp_config: Any, optimizer_config: Any, with_optimizer: bool, lora: Lora | None
    ) -> tuple[list[Any], Any]:
        """Return the model's chunks, wrapped for bfloat16 and for data parallelism, and their optimizer."""
        from megatron.core.transformer.module import Float16Module

        from instep.training.megatron.data_parallel import share_gradients

        wrapped: list[Any] = list(self.chunks)
        if self.dtype is torch.bfloat16:
            wrapped = [Float16Module(self.config, chunk) for chunk in wrapped]
        if not with_optimizer:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            return wrapped, None
        if lora is not None:
            from instep.training.megatron.lora import MegatronLora

            self.adapter = MegatronLora(lora, self.chunks, self.shape, self.placement, self.args.seed)
        finish = (lambda: None) if self.adapter is None else self.adapter.sum_over_expert_ranks
        wrapped, optimizer = share_gradients(wrapped, self.config, ddp_config, optimizer_config, finish)
        keep_moments_as_asked(optimizer, self.args, cuda=self.parallel.device.type == "cuda")
        return wrapped, optimizer

    # Scoring and gradients

    @property
    def embedding(self) -> torch.nn.Module | None:
        return next((chunk.embedding for chunk in self.chunks if chunk.pre_process), None)

    def ready(self) -> None:
        """Wait for masters, moments and gradients in transfer from the host."""
        self._states.ready()

    def forward_only(self, micro_batches: Sequence[TokenBatch], *, entropy: bool = False) -> list[TokenOutputs] | None:
        def keep(batch: TokenBatch, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
            return outputs.log_probs.sum(), outputs.cpu()

        for chunk in self.wrapped:
            chunk.eval()
        with torch.no_grad():
            results = self._run(micro_batches, keep, entropy=entropy, forward_only=True)
        for chunk in self.wrapped:
            chunk.train()
        return results

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, logits: bool = False, more: bool = False
    ) -> list[LossOutput] | None:
        self._states.ready()  # the memory of the gradients comes back with them
        if self.shape.experts is not None:
            from instep.training.megatron.router import weigh_losses

            weigh_losses(self.chunks, micro_batches, self.parallel)
        if self.shape.mtp and self.args.enable_mtp_training and self.parallel.pp_size > 1:
            from instep.training.megatron.mtp import bring_embedding

            bring_embedding(self.chunks, self.placement.pp_group)

        def compute(batch: TokenBatch, outputs: TokenOutputs) -> tuple[Tensor, LossOutput]:
            out = loss_fn(batch, outputs)
            loss, sums = out.loss, out.sums
            if outputs.drafts is not None:
                from instep.training.megatron.mtp import draft_loss

                drafted, more_sums = draft_loss(outputs.drafts, batch)
                loss, sums = loss + self.args.mtp_loss_scaling_factor * drafted, sums | more_sums
            return loss, LossOutput(out.loss.detach().clone(), sums, out.maxes)

        with self._not_reduced() if more else contextlib.nullcontext():
            return self._run(micro_batches, compute, entropy=True, logits=logits, forward_only=False)

    @contextlib.contextmanager
    def _not_reduced(self) -> Iterator[None]:
        """Keep the gradients of the passes in the block local to this rank; later passes add to them."""
        config = self.config
        held = config.no_sync_func, config.finalize_model_grads_func
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        try:
            with contextlib.ExitStack() as stack:
                for chunk in self.wrapped:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = held

    def scale_gradients(self, factor: float) -> None:
        if factor:
            torch._foreach_mul_(self._gradients(), factor)
            return
        with cpu_platform.scope():
            self._zero_grad()

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
        missing = -len(micro_batches) % self.parallel.micro_batch_multiple  # when scoring, any number is possible
        assert forward_only or not missing, "a schedule gives training steps a multiple"
        inputs = [*micro_batches, *[micro_batches[0].without_routes().select([0])] * missing]
        multiple = self.placement.tp_size if self.config.sequence_parallel else 1

        def forward_step(iterator: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[Any, Any]:
            batch = next(iterator).to(device)
            packed = spec.pack(
                batch,
                self.rope,
                dtype=self.dtype,
                multiple=multiple,
                with_entropy=entropy,
                with_logits=logits,
                cp=(self.placement.cp_rank, self.placement.cp_size),
            )
            packed.routes = routes_of(batch, self.shape, packed.rows, (self.placement.tp_rank % multiple, multiple))
            chosen = batch.sample_columns.get(CHOSEN)
            packed.noted, packed.chosen = (chosen, None) if forward_only else (None, chosen)
            kwargs = {"fp32_output": False} if self.dtype is torch.bfloat16 else {}
            output = model(packed.tokens, None, None, packed_seq_params=packed, **kwargs)
            return output, functools.partial(loss, batch)

        def loss(batch: TokenBatch, output: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Any]:
            value, result = last(batch, TokenOutputs(*output))
            return value, torch.zeros((), dtype=torch.int, device=device), result

        with cpu_platform.scope():
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(inputs) for _ in self.wrapped],
                model=self.wrapped,
                num_microbatches=len(inputs),
                seq_length=self.placement.cp_size * multiple,  # each micro-batch sends its own length
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results[: len(micro_batches)] if self.parallel.is_last_stage else None

    def optimizer_step(self, lr: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.args.weight_decay * group["wd_mult"]
        with cpu_platform.scope():
            self.optimizer.prepare_grads()
            drafter = [] if (mtp := self.chunks[-1].drafter) is None else [*mtp.parameters()]
            found = clipping.clip(self.optimizer, drafter, self.args, self.shape, self.parallel.device)
            skipped = not all(map(math.isfinite, found))
            if not skipped:
                self.optimizer.step_with_ready_grads()
            self._zero_grad()
        return StepResult(found[0], skipped)

    def _zero_grad(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    # Weights and checkpoints

    def remark(self) -> str:
        return self.left_out

    def weight_source(self, *, adapter: bool = False) -> MegatronWeightSource:
        parameters = local_parameters(self.chunks, self.placement)
        how: dict[str, Any] = dict(parameters=parameters, dtype=self.dtype, names=self._names)
        if self.adapter is not None:
            return self.adapter.source(self.dtype) if adapter else self.adapter.merged(**how)
        return MegatronWeightSource(self.shape, self.placement, device=self.parallel.device, **how)

    def export_adapter(self, path: Path) -> None:
        assert self.adapter is not None, "this model has no adapter"
        self.adapter.export(path)

    def earlier(self, path: Path) -> Earlier | None:
        return None if self.adapter is None else self.adapter.earlier(path, self.forward_only)

    def load_hf(self, path: Path) -> None:
        parameters = local_parameters(self.chunks, self.placement)
        self.left_out = left_out(load_hf(Path(path), self.shape, self.placement, parameters, self.padded_vocab))
        if self.adapter is not None:
            self.adapter.base = base_for_all(Path(path))
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def save(self, path: Path) -> None:
        from instep.training.megatron import checkpoint

        self._states.ready()
        states = None if self.args.no_save_optim else self.optimizer
        with cpu_platform.scope():
            if self.adapter is not None:
                self.adapter.save(Path(path), states, self.saver)
            elif self.args.ckpt_format == "torch":
                checkpoint.save_torch(Path(path), self.chunks, states, self.shape, self.placement, self.padded_vocab)
            else:
                checkpoint.save(Path(path), self.chunks, states, self.saver)

    def load(self, path: Path, *, optimizer: bool = True, fresh_head: bool = False) -> None:
        from instep.training.megatron import checkpoint

        states, adapter = self.optimizer if optimizer else None, self.adapter
        if adapter is None:
            check_layout(Path(path), None, [], None)
        elif adapter.load(Path(path), states):
            return
        parameters = local_parameters(self.chunks, self.placement)
        unread = checkpoint.load(Path(path), self.shape, self.placement, parameters, states, fresh_head=fresh_head)
        self.left_out = left_out(unread)
        if adapter is not None:
            adapter.base = base_for_all(Path(path))
        if self.optimizer is not None and not optimizer:
            self.optimizer.reload_model_params()

    # Memory (parking.py)

    def _gradients(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        return [b.grad_data for chunk in self.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _local_weights(self) -> list[Tensor]:
        return [tensor for chunk in self.chunks for tensor in local_tensors(chunk)]

    def _optimizer_states(self) -> list[Tensor]:
        """Return masters and moments on the device; in float32 the masters are the parameters."""
        if self.optimizer is None:
            return []
        from instep.training.megatron import checkpoint

        held = checkpoint.masters(self.optimizer).values()
        tensors = [t for m in held for t in (m.tensor, *m.state.values()) if isinstance(t, Tensor)]
        weights = {t.untyped_storage()._cdata for t in self._local_weights()}
        here = [t for t in tensors if t.device.type == self.parallel.device.type]
        return [t for t in here if t.untyped_storage()._cdata not in weights]

    def offload(self, *, weights: bool = True) -> None:
        self._states.leave()
        if weights:
            self._weights.leave()
            for part in (self._states, self._weights):
                part.free()
            give_back(self.parallel.device)

    def onload(self, *, optimizer: bool = True) -> None:
        self._weights.bring()
        self._weights.ready()
        if optimizer:  # masters and moments arrive during the first forward passes
            self._states.bring()
