"""Loads weights straight into the live parameters of a model, at the addresses in its CUDA graphs.

The weights of the model must stay as in the checkpoint: not packed, quantized or fused. The first session loads
through the model's own `load_weights`, and records to which slices of which parameters each weight is copied. Later
ones copy directly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from instep_engine.manifest import WeightMismatch
from instep_engine.memory import Recorder, Slice

APART = "drafters."  # begins the names of parts that a session may leave out as a whole (`sglang/drafter.py`)


def kept(path: str) -> bool:
    """Return whether a module belongs to the layers for images, which no trainer changes."""
    return path.removeprefix("served.").partition(".")[0] == "visual"  # `served`: of a model with a drafter


class DirectLoader:
    """The loader of one model; `begin` begins a session."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._copies: dict[str, list[tuple[str, Slice]]] = {}  # of the weights that are plain copies: their targets
        self._written: dict[str, int] = {}

    def begin(self) -> None:
        self._written = {}  # parameter -> number of elements copied into it

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights into the parameters. Raises the errors of the model's `load_weights`."""
        if new := {name: tensor for name, tensor in tensors.items() if name not in self._copies}:
            live = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
            recorder, parameters = Recorder(live.values()), list(live)
            recorder.sources = new
            with recorder:
                self._model.load_weights(iter(new.items()))
            if recorder.spoiled:
                raise ValueError(
                    f"{recorder.spoiled[0]}: this engine changes it during loading; use another --rollout-backend"
                )
            for number, count in recorder.written:
                self._written[parameters[number]] = self._written.get(parameters[number], 0) + count
            if not recorder.unknown and not recorder.changed:
                for name in new:
                    self._copies[name] = [(parameters[part.target], part) for part in recorder.slices.get(name, ())]
        targets: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name in tensors.keys() - new.keys():
            whole = tensors[name]
            for parameter, part in self._copies[name]:
                target, source = part.view, part.of(whole)
                self._written[parameter] = self._written.get(parameter, 0) + target.numel()
                if source.is_contiguous() and target.is_contiguous() and source.device == target.device:
                    pairs = targets.setdefault((target.dtype, source.dtype), ([], []))
                    pairs[0].append(target)
                    pairs[1].append(source)
                else:
                    target.copy_(source)
        for into, out_of in targets.values():
            torch._foreach_copy_(into, out_of)

    def check_complete(self, padded: Callable[[nn.Module], bool]) -> None:
        """Raise WeightMismatch unless each parameter was completely written in this session, or no trainer has it.

        Args:
            padded: whether a layer has more rows than the checkpoint, which are not written.
        """
        left_out = not any(name.startswith(APART) for name in self._written)
        written = {id(p): self._written.get(name, 0) for name, p in self._model.named_parameters()}  # tied ones once
        for path, layer in self._model.named_modules():
            if left_out and path.startswith(APART):
                continue
            for parameter in layer.parameters(recurse=False):
                here = written[id(parameter)]
                if here < parameter.numel() and not (here > 0 and padded(layer)) and not (here == 0 and kept(path)):
                    some = f"{here} of {parameter.numel()} elements"
                    raise WeightMismatch(f"{path} was not delivered whole ({some})", path)
