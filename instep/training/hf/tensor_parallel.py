"""Tensor parallelism of a transformers model (arXiv:1909.08053): ranks share each layer.

A linear layer is cut by its outputs (columns) or its inputs (rows), as the plan in the model's configuration says
(`base_model_tp_plan`), otherwise by its name; embeddings and output layer are cut by the vocabulary. Between a layer by
columns and the next one by rows, a rank has its own heads or its own part of the MLP; elsewhere all ranks have the
same. Parameters keep their names and become `DTensor`s, which FSDP2, checkpoints and exports support; layers compute
with the local part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from instep.errors import ConfigError
from instep.training.hf.layout import body_of
from instep.training.hf.lora import LoraLinear
from instep.training.hf.shards import Part, local

COLUMNS, GATHERED, ROWS, SPLIT = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
_SUMMED = "replicated_with_grad_allreduce"  # found by its place, see `_inside`
_OLD_NAMES = {"colwise_rep": GATHERED, "rowwise_rep": ROWS}
_BY_NAME = (  # layers by columns, then the layer by rows that takes their outputs; for models without a plan
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
)
_HEADS = {  # layers whose outputs are heads, and the attributes of attentions for their number
    "q_proj": ("num_heads", "num_attention_heads"),
    "k_proj": ("num_key_value_heads",),
    "v_proj": (),
}


class TensorParallel:
    """Cuts `model` over the ranks of `mesh` (one dimension); then each rank has its own part in memory.

    Attributes:
        splits_vocabulary: each rank has the logits of its own part of the vocabulary.

    Args:
        head: whether the output layer is one over the vocabulary.

    Raises:
        ConfigError: the model has no plan, or its sizes cannot be divided.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, *, head: bool):
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._mesh, self._model = mesh, model
        self._summed: list[tuple[nn.Module, str]] = []  # parameters of which each rank computes a part of the gradient
        self._last: tuple[Tensor, Tensor] | None = None
        plan = self._plan()
        names = {module: name for name, module in model.named_modules()}
        for name, (module, style) in plan.items():
            if style in (COLUMNS, GATHERED):
                self._by_columns(names[module], module, gather=style == GATHERED)
            else:
                self._by_rows(name, module, split=style == SPLIT)
        self._inside({module: style for module, style in plan.values()})
        self.splits_vocabulary = head and self._vocabulary()

    def refuse(self, why: str) -> NoReturn:
        where = f"--tensor-model-parallel-size {self.size}"
        remedy = "use another size, or remove the flag: FSDP2 shards the weights in any case"
        raise ConfigError(f"{type(self._model).__name__} cannot be split: {why}", where=where, remedy=remedy)

    def sum_gradients(self) -> None:
        """Sum the gradients of parameters that are whole on each rank, if each rank has computed a part."""
        for module, name in self._summed:
            gradient = getattr(module, name).grad
            if gradient is not None:
                dist.all_reduce(local(gradient), group=self.group)

    # ---- the plan ------------------------------------------------------------------------------------------------

    def _plan(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the split layers, by name, and how each is split."""
        body, config = body_of(self._model), self._model.config.get_text_config()
        wanted = getattr(config, "base_model_tp_plan", None)
        if not wanted:
            return self._plan_by_names(body)
        modules = dict(body.named_modules())
        plan: dict[str, tuple[nn.Module, str]] = {}
        for name in [*modules, *(name for name, _ in body.named_parameters())]:
            style = wanted.get(re.sub(r"\.\d+(?=\.)", ".*", name))
            if style is None or style == _SUMMED or modules.get(name) is self._model.get_input_embeddings():
                continue
            module, style = modules.get(name), _OLD_NAMES.get(style, style)
            if not isinstance(module, nn.Linear) or style not in (COLUMNS, GATHERED, ROWS, SPLIT):
                self.refuse(f"its plan has {style!r} for {name}, which is not supported (experts, latent attention)")
            plan[name] = (module, style)
        return plan

    def _plan_by_names(self, body: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        plan: dict[str, tuple[nn.Module, str]] = {}
        for prefix, parent in body.named_modules():
            children = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
            for columns, rows in _BY_NAME:
                if all(name in children for name in columns) and (last := [name for name in rows if name in children]):
                    styles = {**dict.fromkeys(columns, COLUMNS), last[0]: ROWS}
                    plan |= {f"{prefix}.{name}": (children[name], style) for name, style in styles.items()}
        if not plan:
            self.refuse("its configuration has no plan (base_model_tp_plan), and the names of its layers are unknown")
        return plan

    def _inside(self, plan: dict[nn.Module, str]) -> None:
        """Find parameters between columns and rows, which see one rank's part: norms of query heads, learned
        activations."""
        for parent in self._model.modules():
            columns = [name for name, child in parent.named_children() if plan.get(child) == COLUMNS]
            attends = any(name in _HEADS for name in columns)
            if attends:
                self._check_alike(parent)
            for name, child in parent.named_children() if columns else ():
                if child not in plan and not isinstance(child, nn.Linear) and (attends or name.startswith("act")):
                    for module in child.modules():
                        self._summed += [(module, name) for name, _ in module.named_parameters(recurse=False)]

    def _check_alike(self, attention: nn.Module) -> None:
        """Refuse an attention with parameters per head: each rank would use those of the first heads."""
        for path, module in attention.named_modules():
            own = module is attention or isinstance(module, nn.ModuleList)
            for name, parameter in module.named_parameters(recurse=own and module is not attention):
                if not isinstance(module, nn.Linear) and (own or parameter.ndim > 1):
                    name = f"{path}.{name}".lstrip(".")
                    self.refuse(f"{name} of its attention has a parameter for each head, which is not supported")

    # ---- layers --------------------------------------------------------------------------------------------------

    def _by_columns(self, name: str, layer: nn.Linear, gather: bool) -> None:
        part = None if gather else self._part_of_heads(name, layer)
        if part is None:
            self._split(layer, "weight", 0, name)
            self._split(layer, "bias", 0, name)
        else:
            self._summed += [(layer, kind) for kind, _ in layer.named_parameters(recurse=False)]
        if isinstance(layer, LoraLinear):
            self._summed.append((layer.lora_A, "weight"))
            if part is None:
                self._split(layer.lora_B, "weight", 0, name)
            else:
                self._summed.append((layer.lora_B, "weight"))
        layer.forward = functools.partial(self._columns, layer, gather, part)

    def _part_of_heads(self, name: str, layer: nn.Linear) -> Part | None:
        """Return the outputs of a layer for a rank that shares its key heads with others; None: its own slice.

        Set the new number of heads in the layer's attention.
        """
        parent, _, last = name.rpartition(".")
        if last not in _HEADS:
            return None
        config, attention = self._model.config.get_text_config(), self._model.get_submodule(parent)
        queries: int = config.num_attention_heads
        heads = queries if last == "q_proj" else getattr(config, "num_key_value_heads", None) or queries
        if heads % self.size and (last == "q_proj" or self.size % heads):
            self.refuse(f"its {heads} heads of {last} cannot be divided among {self.size} ranks")
        for attribute in _HEADS[last]:
            if isinstance(vars(attention).get(attribute), int):
                setattr(attention, attribute, max(1, heads // self.size))
        if heads % self.size == 0:
            return None
        attention.num_key_value_groups = queries // self.size  # all of a rank's queries use one key head
        width, first = layer.out_features // heads, self.rank * heads // self.size
        return Part(0, first * width, (first + 1) * width)

    def _by_rows(self, name: str, layer: nn.Linear, split: bool) -> None:
        self._split(layer, "weight", 1, name)
        if isinstance(layer, LoraLinear):
            self._split(layer.lora_A, "weight", 1, name)
            self._summed.append((layer.lora_B, "weight"))
        layer.forward = functools.partial(self._rows, layer, split)

    def _split(self, module: nn.Module, kind: str, dim: int, name: str) -> None:
        """Turn a parameter into a `DTensor` that is cut along `dim`."""
        full = getattr(module, kind)
        if full is None:
            return
        if full.shape[dim] % self.size:
            self.refuse(f"{name} is {list(full.shape)}, which {self.size} ranks do not divide")
        part = distribute_tensor(full.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
        setattr(module, kind, nn.Parameter(part, requires_grad=full.requires_grad))

    def _columns(self, layer: nn.Linear, gather: bool, part: Part | None, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, _Move.apply(x, self, _same, _summed)  # one reduction of the gradient for q, k and v
        bias = None if layer.bias is None else _cut(layer.bias, part)
        out = _linear(layer, self._last[1], part, bias)
        return _Move.apply(out, self, _gathered, _sliced) if gather else out

    def _rows(self, layer: nn.Linear, split: bool, x: Tensor) -> Tensor:
        self._last = None
        if split:
            x = _Move.apply(x, self, _sliced, _gathered)
        out = _Move.apply(_linear(layer, x, None, None), self, _summed, _same)
        return out if layer.bias is None else out + layer.bias

    # ---- the vocabulary ------------------------------------------------------------------------------------------

    def _vocabulary(self) -> bool:
        """Split embeddings and output layer. Return False if they are not plain layers, or cannot be divided."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        plain = type(embedding).forward is nn.Embedding.forward and type(head) is nn.Linear
        if not plain or head.weight.shape[0] % self.size or embedding.weight.shape[0] % self.size:
            return False
        tied = embedding.weight is head.weight
        self._split(embedding, "weight", 0, "embeddings")
        self._split(head, "weight", 0, "output layer")
        self._split(head, "bias", 0, "output layer")
        if tied:
            head.weight = embedding.weight
        embedding.forward = functools.partial(self._embed, embedding)
        head.forward = functools.partial(self._head, head)
        return True

    def _head(self, layer: nn.Linear, x: Tensor) -> Tensor:
        logits = self._columns(layer, False, None, x)
        self._last = None
        return logits

    def _embed(self, layer: nn.Embedding, ids: Tensor) -> Tensor:
        weight = local(layer.weight)
        rows = weight.shape[0]
        here = ids - self.rank * rows
        elsewhere = (here < 0) | (here >= rows)
        padding = None if layer.padding_idx is None else layer.padding_idx - self.rank * rows
        padding = padding if padding is not None and 0 <= padding < rows else None
        out = F.embedding(here.masked_fill(elsewhere, 0), weight, padding)
        return _Move.apply(out.masked_fill(elsewhere[..., None], 0), self, _summed, _same)


def _cut(weight: Tensor, part: Part | None) -> Tensor:
    """Return this rank's part."""
    return local(weight) if part is None else part.of(local(weight))


def _linear(layer: nn.Linear, x: Tensor, part: Part | None, bias: Tensor | None) -> Tensor:
    out = F.linear(x, _cut(layer.weight, part), bias)
    if isinstance(layer, LoraLinear) and layer.enabled:
        a, b = local(layer.lora_A.weight), _cut(layer.lora_B.weight, part)
        out = out + F.linear(F.linear(x, a), b) * layer.scaling
    return out


# ---- between ranks ---------------------------------------------------------------------------------------------------

_Between = Callable[[Tensor, TensorParallel], Tensor]


class _Move(torch.autograd.Function):
    """Computes `there(x)`; its gradient is `back(gradient)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel, there: _Between, back: _Between) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.ranks), None, None, None


def _same(x: Tensor, ranks: TensorParallel) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, ranks: TensorParallel) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # selective checkpointing keeps the result of a product
    dist.all_reduce(x, group=ranks.group)
    return x


def _gathered(x: Tensor, ranks: TensorParallel) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
    dist.all_gather(parts, x.contiguous(), group=ranks.group)
    return torch.cat(parts, dim=-1)


def _sliced(x: Tensor, ranks: TensorParallel) -> Tensor:
    return x.chunk(ranks.size, dim=-1)[ranks.rank].contiguous()
