"""The `hf` train backend: `AutoModelForCausalLM`, plain on one rank and with FSDP2 on several.

Precision: master weights, gradients and moments are float32. On several ranks FSDP2 shards them, casts each layer to
`dtype` for computing, and reduces gradients in float32. On one float32 rank the masters are the model's own parameters.
On bf16 ranks with room for it (`own_copy.py`), forward and backward passes use a second model in `dtype`, whole on each
rank. It is written once per step, and the masters get its gradients, summed over the ranks (`mirror.py`). The same
holds for `--weight-sync single-copy`, where an engine computes with it, too. Without room FSDP2 casts each layer for
each pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from instep.arguments.settings import Settings
from instep.checkpoints.adapter import Base, Lora, export_adapter, write_layout
from instep.checkpoints.dist_checkpoint import cause_of, load_tensors, read_index, refuse_others
from instep.checkpoints.weight_files import weight_files, weight_names
from instep.errors import CheckpointError
from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.models.mtp import left_out
from instep.training import packing
from instep.training.backend import LossFn, LossOutput, ParallelInfo, Role, StepResult, TokenOutputs
from instep.training.hf.lora import AdapterSource, adapted, adapter_weights, attach, earlier, merged
from instep.training.hf.mirror import Mirror, MirroredSource, blank, like_sharded
from instep.training.hf.model import Policy
from instep.training.hf.optimizer import PiecewiseAdamW, adamw_of, load_state, saved_state
from instep.training.hf.own_copy import has_room
from instep.training.hf.shards import DP, TP, local, mesh_of, part_of, shard_over
from instep.training.hf.weights import HfWeightSource, load_hf
from instep.training.lora import Earlier, base_for_all, earlier_of, holds_adapter, peft_config
from instep.training.saving import Saver
from instep.training.selection import Selection
from instep.types import TokenBatch
from instep.weights.parking import Parking, give_back, local_tensors, shard
from instep.weights.source import WeightSource
from instep.weights.way import SINGLE_COPY


def _smallest_memory(device: torch.device) -> float:
    """Return the bytes of the smallest GPU of all ranks (collective): they must decide alike. On a CPU infinity."""
    if device.type != "cuda":
        return math.inf
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(memory, dist.ReduceOp.MIN)
    return float(memory)


class HfBackend:
    """A `TrainBackend` over transformers. The caller has initialised `torch.distributed`, also for one rank.

    Args:
        hf_config: the model's configuration. `load_hf` or `load` must follow: weights start undefined.
        dtype: the type of forward and backward passes, and of the engines' weights.
        with_optimizer: False for a model that only scores (a reference).
        lora: the adapter to train; then the weights are frozen, in `dtype`.
        selection: the weights to train, by the model's names; None: all.

    Raises:
        ConfigError: the model is not decoder-only, or cannot run (found by `remark` or the first forward pass).
    """

    is_adapter = False

    def __init__(
        self,
        args: Settings,
        *,
        hf_config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        with_optimizer: bool = True,
        role: Role = "actor",
        lora: Lora | None = None,
        selection: Selection | None = None,
    ):
        self.args, self.dtype, self.lora = args, dtype, lora
        self._base: Base | None = None  # the base that `load_hf` or `load` has read; only with an adapter
        several, full = dist.get_world_size() > 1, dtype is torch.float32
        self._single_copy = args.weight_sync == SINGLE_COPY and with_optimizer and role == "actor"
        build = functools.partial(
            Policy,
            hf_config,
            recompute=args.recompute_granularity,
            value_head=role == "critic",
            trust_remote_code=args.trust_remote_code,
            max_model_len=args.vllm_max_model_len,
            compiles=device.type == "cuda" and args.tensor_model_parallel_size == 1,
        )
        self.policy = build(torch.float32 if with_optimizer and lora is None else dtype)
        if lora is not None:
            attach(self.policy.model, lora, args.seed)
        if selection is not None:
            selection.apply(dict(self.policy.model.named_parameters()))
        rank, tp = dist.get_rank(), args.tensor_model_parallel_size
        casts = with_optimizer and not full and lora is None and not self._single_copy
        memory = _smallest_memory(device)
        num_parameters = sum(p.numel() for p in self.policy.parameters())
        copies = casts and tp == 1 and has_room(args, num_parameters, memory, dist.get_world_size())
        mirrors = self._single_copy or copies
        self._sharded = several or (casts and not copies)
        mesh = mesh_of(device.type, tp)
        if tp > 1:
            self.policy.parallelize(mesh[TP])
        if self._sharded:
            shard_over(self.policy, self.policy.model, mesh[DP], dtype)
        self.policy.to(device)
        self._mirror = None
        if mirrors:
            one = full and not several and device.type == "cpu"  # on a GPU the masters must outlive the engine
            compute = self.policy if one else blank(build(dtype), device)
            if selection is not None:
                selection.apply(dict(compute.model.named_parameters()))
            if tp > 1:
                compute.parallelize(mesh[TP])
            if copies:
                like_sharded(compute, self.policy, dtype)
            self._mirror = Mirror(self.policy, compute)
        self.parallel = ParallelInfo(
            rank,
            dist.get_world_size(),
            dp_rank=rank // tp,
            dp_size=mesh.size(0),
            tp_size=tp,
            is_output_rank=rank % tp == 0,
            dp_group=mesh.get_group(DP),
            device=device,
        )
        self.policy.num_passes = self._most
        self._checked, self.left_out = False, ""
        self.optimizer = adamw_of(self.policy, args) if with_optimizer else None
        drop = self._compute.parameters if copies else tuple  # `refresh` writes them again
        self._weights = Parking(device, lambda: local_tensors(self.policy), drop)
        self._states = Parking(device, self._optimizer_states)
        self.saver = Saver(device, args.async_save)

    @property
    def _compute(self) -> Policy:
        """The model of forward and backward passes."""
        return self.policy if self._mirror is None else self._mirror.compute

    @property
    def embedding(self) -> nn.Module:
        return self._compute.model.get_input_embeddings()

    def _forward(self, batch: TokenBatch, entropy: bool, logits: bool = False) -> TokenOutputs:
        cu_seqlens, max_seqlen = packing.cu_seqlens(batch)
        if self._mirror is not None:
            self._mirror.refresh()
        policy = self._compute
        outputs = policy(
            batch.tokens,
            packing.position_ids(batch),
            cu_seqlens,
            max_seqlen,
            packing.response_positions(batch),
            packing.response_targets(batch),
            packing.response_temperatures(batch),
            with_entropy=entropy,
            shared=None if logits or not self._compute.layout.packed else packing.shared_prefixes(batch),
            check=not self._checked,
            with_logits=logits,
        )
        self._checked = True
        return TokenOutputs(*outputs)

    def _most(self, number: int) -> int:
        """Return the largest `number` of all ranks."""
        if self.parallel.world_size == 1:
            return number
        most = torch.tensor(number, device=self.parallel.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.parallel.dp_group)
        return int(most)

    def remark(self) -> str:
        if not self._checked:
            one = torch.ones(1, dtype=torch.long)
            tokens = torch.arange(4) % self._compute.vocab_size
            self.forward_only([TokenBatch(tokens, 4 * one, one, sample_columns={"temperature": one.float()})])
        return "\n".join(filter(None, (self._compute.remark, self.left_out)))

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[TokenBatch], *, entropy: bool = False) -> list[TokenOutputs]:
        return [self._forward(batch.to(self.parallel.device), entropy).cpu() for batch in micro_batches]

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, logits: bool = False, more: bool = False
    ) -> list[LossOutput]:
        results = []
        for batch in micro_batches:
            batch = batch.to(self.parallel.device)
            result = loss_fn(batch, self._forward(batch, entropy=True, logits=logits))
            result.loss.backward()
            result.loss = result.loss.detach()
            results.append(result)
        return results

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        self._reshard()
        grads = [local(p.grad) for p in self.policy.parameters() if p.grad is not None]
        grads += [] if self._mirror is None else self._mirror.gradients
        if factor:
            torch._foreach_mul_(grads, factor)
            return
        self.policy.zero_grad()
        if self._mirror is not None:
            self._mirror.forget_gradients()

    @torch.no_grad()
    def optimizer_step(self, lr: float) -> StepResult:
        assert self.optimizer is not None, "this model was built without an optimizer"
        self._states.ready()
        if self._mirror is not None:
            self._mirror.hand_over_gradients()
        if self.policy.parallel is not None:
            self.policy.parallel.sum_gradients()
        trained = [p for p in self.policy.parameters() if p.grad is not None]
        grads = [local(p.grad) for p in trained]
        norm = self._global_norm(trained)
        skipped = not math.isfinite(norm)
        if not skipped:
            clips = self.args.clip_grad > 0 and norm > self.args.clip_grad
            self._clip(grads, self.args.clip_grad / (norm + 1e-6) if clips else 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._changed()
        return StepResult(norm, skipped)

    def _clip(self, grads: list[Tensor], factor: float) -> None:
        if isinstance(self.optimizer, PiecewiseAdamW):
            self.optimizer.clip = factor  # applied in the optimizer's own pass over the gradients
        elif factor != 1:
            torch._foreach_mul_(grads, factor)

    def _global_norm(self, trained: list[nn.Parameter]) -> float:
        """Return the norm over the whole model. A parameter that all tensor-parallel ranks hold whole counts once."""
        first = self.parallel.is_output_rank
        grads = [local(p.grad) for p in trained if p.grad is not None and (first or part_of(p) is not None)]
        square = torch.zeros((), device=self.parallel.device)
        if grads:
            square += torch.stack(torch._foreach_norm(grads)).square().sum()
        if self._sharded:
            dist.all_reduce(square)
        return float(square.sqrt())

    def _changed(self) -> None:
        if self._mirror is not None:
            self._mirror.changed()

    @functools.cached_property
    def _names(self) -> CheckpointNames:
        """Return the names of the weights in the checkpoint of the model's configuration."""
        folder = Path(self.policy.model.config.name_or_path)
        names = weight_names(weight_files(folder)) if (folder / "config.json").exists() else None
        return CheckpointNames(self.policy.model, names)

    def weight_source(self, *, adapter: bool = False) -> WeightSource:
        if adapter:
            return self._adapter_source(self.dtype)
        if self._mirror is not None and self._single_copy:
            return MirroredSource(self.policy.model, self.dtype, self._names, self._mirror)
        return HfWeightSource(self.policy.model, self.dtype, self._names, merged(self.policy.model))

    def _adapter_source(self, dtype: torch.dtype) -> AdapterSource:
        assert self.lora is not None and self._base is not None, "this model has no adapter, or no weights yet"
        config = peft_config(self.lora, adapted(self.policy.model), self._base)
        return AdapterSource(self.policy.model, dtype, self.parallel.rank == 0, config)

    def export_adapter(self, path: Path) -> None:
        source = self._adapter_source(torch.float32)
        export_adapter(source, source.config, path)

    def earlier(self, path: Path) -> Earlier | None:
        """See `TrainBackend.earlier`."""
        model = self.policy.model
        return earlier_of(
            path, self._base, lambda: earlier(model, self._adapter_source(torch.float32).specs, self.forward_only)
        )

    def load_hf(self, path: Path) -> None:
        unread = load_hf(self.policy.model, Path(path), fresh=self._fresh_head(self.policy.value_head))
        self.left_out = left_out(unread)
        self._changed()
        self._remember_base(Path(path))

    def _remember_base(self, path: Path) -> None:
        if self.lora is not None:
            self._base = base_for_all(path)

    @torch.no_grad()
    def _fresh_head(self, fresh: bool) -> str | None:
        """With `fresh`, set the output layer to zero and return its name."""
        if not fresh:
            return None
        head = self.policy.model.get_output_embeddings().weight
        head.zero_()
        return next(name for name, weight in named_weights(self.policy.model).items() if weight is head)

    def _named(self, adapter: bool) -> dict[str, Tensor]:
        return adapter_weights(self.policy.model) if adapter else named_weights(self.policy.model)

    def _state(self, optimizer: bool, adapter: bool) -> dict[str, Any]:
        """Return everything that `save` writes, by name; `load` copies into the same tensors."""
        self._states.ready()
        weights = self._named(adapter)
        state: dict[str, Any] = {"model": {name: w.detach() for name, w in weights.items()}}
        if optimizer and self.optimizer is not None:
            trained = {n: w for n, w in weights.items() if w in self.optimizer.state}
            state["optimizer"] = {n: saved_state(self.optimizer, w) for n, w in trained.items()}
        return state

    def save(self, path: Path) -> None:
        try:
            self.saver.save(self._state(not self.args.no_save_optim, adapter=self.lora is not None), Path(path))
            if self.lora is not None and self._base is not None and self.parallel.rank == 0:
                write_layout(Path(path), self.lora, list(adapted(self.policy.model)), self._base)
        except (OSError, CheckpointException) as error:
            what = f"cannot write: {cause_of(error)}"
            raise CheckpointError(what, where=str(path), remedy="free space, or --save to another disk") from error

    def load(self, path: Path, *, optimizer: bool = True, fresh_head: bool = False) -> None:
        if (Path(path) / "metadata.json").exists() or any(Path(path).glob("mp_rank_*")):
            remedy = (
                "convert it to a Hugging Face folder: `instep convert megatron-to-hf`; or use --train-backend megatron"
            )
            raise CheckpointError("it is a Megatron checkpoint", where=str(path), remedy=remedy)
        layers = list(adapted(self.policy.model))
        adapter = holds_adapter(Path(path), self.lora, layers, self._base, resumes=optimizer)
        state = self._state(optimizer, adapter)
        if (head := self._fresh_head(fresh_head)) is not None:
            del state["model"][head]
        index = read_index(Path(path))
        refuse_others(Path(path), index, {*state["model"], str(head)})
        load_tensors(state, Path(path), index)
        for name, moments in state.get("optimizer", {}).items():
            assert self.optimizer is not None
            load_state(self.optimizer, self._named(adapter)[name], moments)
        self._changed()
        if not adapter:
            self._remember_base(Path(path))

    def _optimizer_states(self) -> list[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        tensors = [shard(v) for state in states for v in state.values() if isinstance(v, Tensor)]
        return [t for t in tensors if t.device.type == self.parallel.device.type]

    def _reshard(self) -> None:
        """Restore the sharded parameters, which have the gradients: the root keeps what a forward pass has gathered."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def offload(self, *, weights: bool = True) -> None:
        self._reshard()
        if not weights:
            give_back(self.parallel.device)
            self._states.leave()
            return
        parts = (self._states, self._weights)
        for part in parts:
            part.leave()
        for part in parts:
            part.free()
        if not self._single_copy:
            self._changed()  # the copy is not valid any more
        give_back(self.parallel.device)

    def onload(self, *, optimizer: bool = True) -> None:
        self._weights.bring()
        self._weights.ready()
        if optimizer:  # they arrive during the first forward passes
            self._states.bring()
