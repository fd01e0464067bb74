"""AdamW (arXiv:1711.05101), whose moments may be kept in 8 bits, in pinned host memory, or both.

Moments in 8 bits are those of arXiv:2110.02861: blocks of 256 numbers, each block with a scale of its own, each number
as one of 256 values that lie the denser the smaller they are. Two things differ. The scale is the block's largest
number with its sign, which then is exactly 1: numbers that were read and are written again stay as they are, so that a
checkpoint holds moments in float32 whatever the kind, and any kind goes on from it. And a second moment above zero
never becomes zero, which would make the step of its weight a thousand times too large.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from instep.training.hf.shards import local, part_of

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

EIGHT_BITS = "adamw_8bit"
BLOCK = 256
SMALLEST = 4096  # elements of a parameter whose moments are worth 8 bits
_PIECE = 2**23  # elements whose moments are on the device, or unpacked, at a time; a multiple of BLOCK
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_of(policy: nn.Module, args: Settings) -> torch.optim.AdamW:
    """The optimizer of the parameters that are trained: decoupled weight decay, not for biases and other 1-D ones.

    Moments exist from the start, so that a checkpoint has them before the first step and memory does not grow later.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # a fused step takes tensors of one mesh
    for name, p in policy.named_parameters():
        if p.requires_grad:
            decays = p.ndim > 1 and not name.endswith(".bias")
            groups.setdefault((decays, part_of(p) is not None), []).append(p)
    parts = [{"params": p, "weight_decay": args.weight_decay * decays} for (decays, _), p in groups.items()]
    options: dict[str, Any] = dict(lr=0.0, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps, fused=True)
    offload = args.optimizer_cpu_offload and any(p.is_cuda for group in groups.values() for p in group)
    if args.optimizer == EIGHT_BITS or offload:
        return PiecewiseAdamW(parts, options, eight_bits=args.optimizer == EIGHT_BITS, offload=offload)
    optimizer = torch.optim.AdamW(parts, **options)
    for p in (p for group in groups.values() for p in group):
        step = torch.zeros((), device=p.device)
        optimizer.state[p] = {"step": step, **{name: torch.zeros_like(p) for name in MOMENTS}}
    return optimizer


def saved_state(optimizer: torch.optim.AdamW, p: nn.Parameter) -> dict[str, Tensor]:
    """The step and the moments of a parameter in float32, for a checkpoint; `load_state` takes them back."""
    if isinstance(optimizer, PiecewiseAdamW):
        return optimizer.unpacked(p)
    return optimizer.state[p]


def load_state(optimizer: torch.optim.AdamW, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
    """Take what a checkpoint has put into the tensors of `saved_state`."""
    if isinstance(optimizer, PiecewiseAdamW):
        optimizer.pack(p, saved)


class PiecewiseAdamW(torch.optim.AdamW):
    """AdamW that brings moments to the device, or unpacks them, a piece of a parameter at a time.

    The state of a parameter is flat: `exp_avg` and `exp_avg_sq` are float32, or uint8 with `exp_avg_scale` and
    `exp_avg_sq_scale`, filled up to whole blocks; of a sharded parameter they are this rank's part.

    Args:
        offload: moments are in pinned host memory.
    """

    def __init__(self, parts: list[dict[str, Any]], options: dict[str, Any], *, eight_bits: bool, offload: bool):
        super().__init__(parts, **options)
        self.offload = offload
        for p in (p for group in self.param_groups for p in group["params"]):
            mine = local(p.detach())
            packed, size = eight_bits and p.numel() >= SMALLEST, mine.numel()
            kinds: dict[str, tuple[int, torch.dtype]] = {name: (size, torch.float32) for name in MOMENTS}
            if packed:
                blocks = -(-size // BLOCK)
                kinds = {name: (blocks * BLOCK, torch.uint8) for name in MOMENTS}
                kinds |= {f"{name}_scale": (blocks, torch.float32) for name in MOMENTS}
            where: dict[str, Any] = {"pin_memory": True} if offload else {"device": mine.device}
            state = {name: torch.zeros(length, dtype=dtype, **where) for name, (length, dtype) in kinds.items()}
            if packed:
                for name in MOMENTS:
                    state[name].fill_(int(_values(name == MOMENTS[0], torch.device("cpu")).eq(0).nonzero()))
            self.state[p] = {"step": torch.zeros((), device=mine.device), **state}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pieces = list(self._pieces())
        for (group, step, weight, grad, _), stored in zip(pieces, self._brought(p[-1] for p in pieces), strict=True):
            moments = [_unpack(stored, name) for name in MOMENTS]
            first, second = (moment[: len(weight)] for moment in moments)
            beta1, beta2 = group["betas"]
            adamw([weight], [grad], [first], [second], [], [step.clone()], fused=True, amsgrad=False,
                  beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                  maximize=False)  # fmt: skip
            for name, moment in zip(MOMENTS, moments, strict=True):
                _pack(stored, name, moment)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] += 1

    def _pieces(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor, dict[str, Tensor]]]:
        """Group, step, and pieces of the weight, its gradient and what is stored of its moments."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, grad = local(p.detach()).view(-1), local(p.grad).reshape(-1)
                for start in range(0, weight.numel(), _PIECE):
                    piece = slice(start, start + _PIECE)
                    blocks = slice(start // BLOCK, (start + _PIECE) // BLOCK)
                    stored = {
                        name: tensor[blocks if name.endswith("_scale") else piece]
                        for name, tensor in self.state[p].items()
                        if name != "step"
                    }
                    yield group, self.state[p]["step"], weight[piece], grad[piece], stored

    def _brought(self, pieces: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Each piece on the device, from where what has been written is taken back.

        Two streams copy in and out while a third computes; three slots of buffers go round.
        """
        if not self.offload:
            yield from pieces
            return
        main, inward, outward = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        slots = [_Slot() for _ in range(3)]
        waiting: list[tuple[_Slot, dict[str, Tensor]]] = []

        def fetch(index: int, host: dict[str, Tensor]) -> None:
            slot = slots[index % 3]
            if slot.make_room(host):
                inward.wait_stream(main)  # which may still use what was there before
            inward.wait_event(slot.left)
            with torch.cuda.stream(inward):
                slot.copy_in(host)
            slot.arrived.record(inward)
            waiting.append((slot, host))

        def give_out() -> Iterator[dict[str, Tensor]]:
            slot, host = waiting.pop(0)
            main.wait_event(slot.arrived)
            yield slot.here
            slot.computed.record(main)
            outward.wait_event(slot.computed)
            with torch.cuda.stream(outward):
                slot.copy_out(host)
            slot.left.record(outward)

        for index, host in enumerate(pieces):
            fetch(index, host)
            if len(waiting) == 2:  # one is on its way while the other is computed with
                yield from give_out()
        while waiting:
            yield from give_out()
        torch.cuda.synchronize()  # the host may read the moments, and the buffers be freed

    def unpacked(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[p]
        mine = local(p.detach())
        moments = {name: _unpack(state, name)[: mine.numel()].view(mine.shape) for name in MOMENTS}
        if f"{MOMENTS[0]}_scale" in state:
            moments = {name: moment.cpu() for name, moment in moments.items()}
        return {"step": state["step"], **{name: _like(p, moment) for name, moment in moments.items()}}

    @torch.no_grad()
    def pack(self, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
        for name in MOMENTS:
            state = self.state[p]
            if f"{name}_scale" in state:
                moment = local(saved[name]).reshape(-1).to(state[name].device)
                _pack(state, name, F.pad(moment, (0, len(state[name]) - len(moment))))


class _Slot:
    """Buffers on the device for the moments of one piece."""

    def __init__(self) -> None:
        self.arrived, self.computed, self.left = (torch.cuda.Event() for _ in range(3))
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}  # none is freed in a step: it may be on its way out
        self.here: dict[str, Tensor] = {}

    def make_room(self, host: dict[str, Tensor]) -> bool:
        """Have buffers for tensors like these; whether some are new."""
        new = [(name, tensor.dtype) for name, tensor in host.items() if (name, tensor.dtype) not in self._room]
        for name, dtype in new:
            length = _PIECE // BLOCK if name.endswith("_scale") else _PIECE
            self._room[name, dtype] = torch.empty(length, dtype=dtype, device="cuda")
        return bool(new)

    def copy_in(self, host: dict[str, Tensor]) -> None:
        self.here = {name: self._room[name, tensor.dtype][: len(tensor)] for name, tensor in host.items()}
        for name, tensor in host.items():
            self.here[name].copy_(tensor, non_blocking=True)

    def copy_out(self, host: dict[str, Tensor]) -> None:
        for name, tensor in host.items():
            tensor.copy_(self.here[name], non_blocking=True)


def _like(p: Tensor, mine: Tensor) -> Tensor:
    """`mine` as a tensor that is sharded as the parameter; it may lie on the host."""
    return DTensor(mine, p._spec, requires_grad=False) if isinstance(p, DTensor) else mine


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


@functools.cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that a code stands for, ascending, the largest 1 (dynamic tree quantization)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        means = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


def _unpack(stored: dict[str, Tensor], name: str) -> Tensor:
    """A moment in float32, up to the end of its last block; the stored tensor itself where that is its kind."""
    scale = stored.get(f"{name}_scale")
    if scale is None:
        return stored[name]
    codes = stored[name].view(-1, BLOCK)
    return (_values(name == MOMENTS[0], codes.device)[codes.int()] * scale[:, None]).view(-1)


def _pack(stored: dict[str, Tensor], name: str, moment: Tensor) -> None:
    """Write a moment to where `_unpack` has read it."""
    if f"{name}_scale" not in stored:
        return  # it was written in place
    signed, blocks = name == MOMENTS[0], moment.view(-1, BLOCK)
    high, low = blocks.amax(1), blocks.amin(1)
    scale = torch.where(high >= -low, high, low)
    relative = blocks / scale.where(scale != 0, torch.ones_like(scale))[:, None]
    values = _values(signed, moment.device)
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2, out_int32=True)
    if not signed:
        codes = torch.where(relative > 0, codes.clamp(min=1), codes)
    stored[name].copy_(codes.view(-1))
    stored[f"{name}_scale"].copy_(scale)
