"""The tensors of a Hugging Face checkpoint <-> those of the model that transformers builds from it.

For example, transformers holds all experts of a layer in one tensor, and checkpoints hold one tensor per expert. Its
own mapping (`transformers.conversion_mapping`) describes this for each model that needs it. It is used here in both
directions, on a few tensors at a time, with the names in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_layers import GradientCheckpointingLayer

from instep.models.mtp import mtp_names, num_mtp_layers


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers under their module names, tied ones once.

    LoRA adapters (`training/hf/lora.py`) are not included.
    """
    seen: set[int] = set()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not name.endswith((".lora_A.weight", ".lora_B.weight")):
            seen.add(id(tensor))
            out[name] = tensor
    return out


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model`, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@dataclass
class Group:
    """Tensors that are converted together, such as the gate and up projections of all experts of a layer.

    Attributes:
        model: their names in the model.
        checkpoint: their names in the checkpoint, experts in order.
        shapes: the full shapes of `checkpoint`.
    """

    model: list[str]
    checkpoint: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    converter: WeightConverter | None = None
    patterns: list[str] = field(default_factory=list)  # which source of the converter each of `checkpoint` is
    inner: list[str] = field(default_factory=list)  # the names of `checkpoint` in the converter


class CheckpointNames:
    """What each tensor of a checkpoint becomes in a model, and back.

    Attributes:
        groups: every weight of the model is in one of them, in the order of the model.
        missing: names (of transformers) of tensors that are missing in the checkpoint.
        extra: names of tensors of the checkpoint that the model does not have and transformers does not ignore.
        mtp: names of tensors of multi-token prediction, which the model does not have.

    Args:
        model: plain or sharded; only names and shapes are read.
        names: the checkpoint's tensors; None: those that `save_pretrained` would write.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str] | None = None):
        self._model = model
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        weights = named_weights(model)
        self._shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        tied = dict.fromkeys(set(model.state_dict()) - set(weights))
        if names is None:
            from transformers.core_model_loading import revert_weight_conversion

            blank = {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}
            names = revert_weight_conversion(model, blank)
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        found: dict[str, Group] = {}
        unknown = [name for name in sorted(names, key=dot_natural_key) if not self._place(name, found)]
        config = model.config.to_dict()
        self.mtp = mtp_names(unknown, config.get("num_hidden_layers") or 0, num_mtp_layers(config))
        known = {*tied, *self.mtp}
        self.extra = [n for n in unknown if n not in known and not any(p.search(n) for p in ignored)]
        self.missing: list[str] = []
        self.groups: list[Group] = []
        grouped: set[str] = set()
        for name in self._shapes:
            group = found.get(name)
            if group is None and name not in grouped:
                self.missing.append(name)
                group = Group([name], [name])
            if group is not None:
                self._complete(group)
                grouped.update(group.model)
                self.groups.append(group)

    def _place(self, name: str, found: dict[str, Group]) -> bool:
        """Put a tensor of the checkpoint into the group of the first weight made from it. Return False without one."""
        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._shapes)
        if renamed not in self._shapes:  # perhaps it has the model's own name already
            renamed, pattern = rename_source_key(name, [], [], prefix, self._shapes)
        converter = next((c for c in self._converters if pattern in c.source_patterns), None)
        targets = [renamed]
        if converter is not None:
            first = converter.target_patterns[0]
            targets = [renamed.replace(first, target, 1) for target in converter.target_patterns]
        if any(target not in self._shapes for target in targets):
            return False
        group = found.setdefault(renamed, Group(targets, converter=converter))
        group.checkpoint.append(name)
        if pattern is not None:
            group.patterns.append(pattern)
            group.inner.append(rename_source_key(name, self._renamings, [])[0])
        return True

    def _complete(self, group: Group) -> None:
        """Find the shapes in the checkpoint, and which of a group's tensors are missing there."""
        blank = {name: torch.empty(self._shapes[name], device="meta") for name in group.model}
        if group.converter is None:
            group.shapes = [self._shapes[group.model[0]]]
            return
        parts = self._reverted(group, blank)
        lacking = set(parts) - set(group.inner)
        self.missing += sorted(lacking, key=dot_natural_key)
        self.extra += [n for n, inner in zip(group.checkpoint, group.inner, strict=True) if inner not in parts]
        if not lacking:
            group.shapes = [tuple(parts[inner].shape) for inner in group.inner if inner in parts]

    def to_model(self, group: Group, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the model's weights of a group from the checkpoint's tensors, in the order of `group.checkpoint`.

        Raises:
            ValueError, RuntimeError: their shapes do not fit together.
        """
        if group.converter is None:
            return {group.model[0]: tensors[0]}
        for name, pattern, tensor in zip(group.checkpoint, group.patterns, tensors, strict=True):
            group.converter.add_tensor(group.model[0], name, pattern, tensor)
        made = group.converter.convert(group.model[0], model=self._model, config=self._model.config)
        return {name: made[name][0] if isinstance(made[name], list) else made[name] for name in group.model}

    def to_checkpoint(self, group: Group, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the checkpoint's tensors of a group, in the order of `group.checkpoint`, from the model's full
        weights."""
        if group.converter is None:
            return [weights[group.model[0]]]
        parts = self._reverted(group, weights)
        return [parts[inner] for inner in group.inner]

    def _reverted(self, group: Group, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert group.converter is not None
        back = group.converter.reverse_transform()
        first = ""
        for name in group.model:
            renamed, pattern = back.rename_source_key(name)
            first = first or renamed
            back.add_tensor(renamed, name, pattern, weights[name])
        made = back.convert(first, model=self._model, config=self._model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
