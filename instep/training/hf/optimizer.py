"""AdamW (arXiv:1711.05101), whose moments may be kept in 8 bits, in pinned host memory, or both.

For moments in 8 bits see `eight_bits.py`. On a GPU a step with them is one compiled kernel, which reads and writes
weights and codes once and needs no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from instep.arguments.settings import Settings
from instep.training.adjacent import joined, lay_out
from instep.training.hf.eight_bits import BLOCK, Codes, code_tables, code_values, decoded, encoded
from instep.training.hf.shards import local, part_of

EIGHT_BITS = "adamw_8bit"
SMALLEST = 4096  # smaller parameters keep their moments in float32
_PIECE = 2**23  # elements whose moments are on the device, or unpacked, at a time; a multiple of BLOCK
_RESIDENT = 4  # pieces per call of the compiled kernel if nothing is copied: it unpacks into registers
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_of(policy: nn.Module, args: Settings) -> torch.optim.AdamW:
    """Return the optimizer of the trained parameters: decoupled weight decay, except for biases and other 1-D ones.

    Moments exist from the start. So a checkpoint has them before the first step, and memory does not grow later.
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
        kind = {"eight_bits": args.optimizer == EIGHT_BITS, "offload": offload, "compiles": not args.no_torch_compile}
        return PiecewiseAdamW(parts, options, **kind)
    optimizer = torch.optim.AdamW(parts, **options)
    for p in (p for group in groups.values() for p in group):
        step = torch.zeros((), device=p.device)
        optimizer.state[p] = {"step": step, **{name: torch.zeros_like(p) for name in MOMENTS}}
    return optimizer


def saved_state(optimizer: torch.optim.AdamW, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the step and the moments of a parameter in float32, for a checkpoint; `load_state` reads them back."""
    if isinstance(optimizer, PiecewiseAdamW):
        return optimizer.unpacked(p)
    return optimizer.state[p]


def load_state(optimizer: torch.optim.AdamW, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
    """Copy what a checkpoint has put into the tensors of `saved_state` into the optimizer."""
    if isinstance(optimizer, PiecewiseAdamW):
        optimizer.pack(p, saved)


class _Piece(NamedTuple):
    """Elements of a parameter and of its gradient, and their stored moments."""

    group: dict[str, Any]
    step: Tensor
    rates: Tensor | None  # of `_rates`, for the compiled kernel
    weight: Tensor
    grad: Tensor  # before it is clipped
    stored: dict[str, Tensor]

    def part(self, start: int, stop: int) -> _Piece:
        """Return elements [start, stop). Both are multiples of BLOCK, or `stop` is at the end or beyond it."""
        here, blocks = slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
        full = slice(start, blocks.stop * BLOCK)  # codes are padded to whole blocks
        stored = {name: t[blocks if name.endswith("_scale") else full] for name, t in self.stored.items()}
        return self._replace(weight=self.weight[here], grad=self.grad[here], stored=stored)


class _Run(NamedTuple):
    """Parameters whose gradients follow each other, as do their weights and moments."""

    group: dict[str, Any]
    params: list[Tensor]
    weight: Tensor
    stored: dict[str, Tensor]


class _Slot:
    """Buffers on the device for the moments of `length` elements, and scales of `block` of them.

    Attributes:
        here: the moments, by name.
    """

    def __init__(self, length: int, block: int) -> None:
        self._length, self._block = length, block
        self.arrived, self.computed, self.left = (torch.cuda.Event() for _ in range(3))
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}  # nothing is freed in a step: it may still be copied out
        self.here: dict[str, Tensor] = {}

    def make_room(self, host: dict[str, Tensor]) -> bool:
        """Allocate buffers for tensors like these. Return whether some are new."""
        new = [(name, tensor.dtype) for name, tensor in host.items() if (name, tensor.dtype) not in self._room]
        for name, dtype in new:
            length = self._length // self._block if name.endswith("_scale") else self._length
            self._room[name, dtype] = torch.empty(length, dtype=dtype, device="cuda")
        return bool(new)

    def copy_in(self, host: dict[str, Tensor]) -> None:
        self.here = {name: self._room[name, tensor.dtype][: len(tensor)] for name, tensor in host.items()}
        for name, tensor in host.items():
            self.here[name].copy_(tensor, non_blocking=True)

    def copy_out(self, host: dict[str, Tensor]) -> None:
        for name, tensor in host.items():
            tensor.copy_(self.here[name], non_blocking=True)


class PiecewiseAdamW(torch.optim.AdamW):
    """AdamW that brings moments to the device, or unpacks them, a piece of a parameter at a time.

    The state of a parameter is flat: `exp_avg` and `exp_avg_sq` are float32, or uint8 with `exp_avg_scale` and
    `exp_avg_sq_scale`, padded to whole blocks. For a sharded parameter they are this rank's part.

    Args:
        offload: moments are in pinned host memory.
        compiles: step parameters with moments in 8 bits in a compiled kernel, if they are on a GPU.
    """

    def __init__(
        self,
        parts: list[dict[str, Any]],
        options: dict[str, Any],
        *,
        eight_bits: bool,
        offload: bool,
        compiles: bool = True,
    ):
        super().__init__(parts, **options)
        self.clip = 1.0  # the gradients of the next step are multiplied by this
        self._runs: list[_Run] = []
        self.offload = offload
        self.compiles = compiles and any(p.is_cuda for group in self.param_groups for p in group["params"])
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
                    state[name].fill_(int(code_values(name == MOMENTS[0], torch.device("cpu")).eq(0).nonzero()))
            self.state[p] = {"step": torch.zeros((), device=mine.device), **state}

    def join(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Step parameters together, of which small ones cost more to start than to step: one call for each run.

        Their weights and moments move to where they follow each other. Only for moments in 8 bits on the device.

        Args:
            gradients: parameters that have a gradient in each step, and its memory, in the order of addresses.
        """
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        runs: list[list[tuple[Tensor, Tensor]]] = [[]]
        for p, gradient in gradients:
            if f"{MOMENTS[0]}_scale" not in self.state[p]:
                runs.append([])
                continue
            run = [*runs[-1], (p, gradient)]
            fits = sum(q.numel() for q, _ in run) <= _PIECE * _RESIDENT and groups[id(p)] is groups[id(run[0][0])]
            if fits and all(q.numel() % BLOCK == 0 for q, _ in run[:-1]) and joined([g for _, g in run]) is not None:
                runs[-1] = run
            else:
                runs.append([(p, gradient)])
        for params in ([p for p, _ in run] for run in runs if len(run) > 1):
            names = [name for name in self.state[params[0]] if name != "step"]
            stored = {name: lay_out([self.state[p][name] for p in params]) for name in names}
            self._runs.append(_Run(groups[id(params[0])], params, lay_out(params), stored))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pieces = list(self._pieces())
        if not self.offload:
            plain = [piece for piece in pieces if f"{MOMENTS[0]}_scale" not in piece.stored]
            for group in self.param_groups:
                _step_plain([piece for piece in plain if piece.group is group], self.clip)
            pieces = [piece for piece in pieces if f"{MOMENTS[0]}_scale" in piece.stored]
        for piece, stored in zip(pieces, self._brought(piece.stored for piece in pieces), strict=True):
            _step(piece._replace(stored=stored), self.compiles, self.clip)
        taken = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if taken:
            torch._foreach_add_([self.state[p]["step"] for p in taken], 1)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            steps = torch.stack([self.state[p]["step"] for p in params])
            rates = _rates(group, steps, self.clip) if self.compiles else None
            wholes = {}
            for i, p in enumerate(params):
                step, stored = self.state[p]["step"], {k: t for k, t in self.state[p].items() if k != "step"}
                weight, grad = local(p.detach()).view(-1), local(p.grad).reshape(-1)
                wholes[id(p)] = _Piece(group, step, None if rates is None else rates[i], weight, grad, stored)
            for run in (run for run in self._runs if run.group is group):
                own = [wholes[id(p)] for p in run.params if id(p) in wholes]
                if len(own) == len(run.params) and (gradient := joined([piece.grad for piece in own])) is not None:
                    for p in run.params[1:]:
                        del wholes[id(p)]
                    wholes[id(run.params[0])] = own[0]._replace(weight=run.weight, grad=gradient, stored=run.stored)
            length = _PIECE * (_RESIDENT if self.compiles and not self.offload else 1)
            for whole in wholes.values():
                for start in range(0, len(whole.weight), length):
                    yield whole.part(start, start + length)

    def _brought(self, pieces: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield each piece on the device, and copy its results back afterwards.

        Two streams copy in and out while a third computes; three slots of buffers are used in turn.
        """
        if not self.offload:
            yield from pieces
            return
        main, inward, outward = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        slots = [_Slot(_PIECE, BLOCK) for _ in range(3)]
        waiting: list[tuple[_Slot, dict[str, Tensor]]] = []

        def fetch(index: int, host: dict[str, Tensor]) -> None:
            slot = slots[index % 3]
            if slot.make_room(host):
                inward.wait_stream(main)  # which may still use the former content
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
            if len(waiting) == 2:  # one is in transfer while the other is computed with
                yield from give_out()
        while waiting:
            yield from give_out()
        torch.cuda.synchronize()  # the host may read the moments, and the buffers may be freed

    def unpacked(self, p: nn.Parameter) -> dict[str, Tensor]:
        moments = {name: self.moment(p, name) for name in MOMENTS}
        if f"{MOMENTS[0]}_scale" in self.state[p]:
            moments = {name: moment.cpu() for name, moment in moments.items()}
        return {"step": self.state[p]["step"], **{name: _like(p, moment) for name, moment in moments.items()}}

    def pack(self, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
        for name in MOMENTS:
            if f"{name}_scale" in self.state[p]:  # otherwise it was written in place
                self.set_moment(p, name, local(saved[name]))

    def moment(self, p: Tensor, name: str) -> Tensor:
        """Return a moment of this rank's part of a parameter in float32: a copy, or the stored tensor if it is
        float32."""
        mine = local(p.detach())
        return _unpack(self.state[p], name)[: mine.numel()].view(mine.shape)

    @torch.no_grad()
    def set_moment(self, p: Tensor, name: str, moment: Tensor) -> None:
        """Set a moment from float32, with as many elements as `moment` returns."""
        state, moment = self.state[p], moment.reshape(-1)
        if f"{name}_scale" not in state:
            state[name].copy_(moment)
            return
        moment = moment.to(state[name].device)
        _pack(state, name, F.pad(moment, (0, len(state[name]) - len(moment))))


def _like(p: Tensor, mine: Tensor) -> Tensor:
    """Return `mine` as a tensor that is sharded like the parameter; it may be on the host."""
    return DTensor(mine, p._spec, requires_grad=False) if isinstance(p, DTensor) else mine


# ---- moments as they are stored --------------------------------------------------------------------------------------


def _unpack(stored: dict[str, Tensor], name: str) -> Tensor:
    """Return a moment in float32, up to the end of its last block; the stored tensor itself if it is float32."""
    scale = stored.get(f"{name}_scale")
    if scale is None:
        return stored[name]
    codes = code_tables(name == MOMENTS[0], scale.device)
    return decoded(stored[name].view(-1, BLOCK), scale, codes).view(-1)


def _pack(stored: dict[str, Tensor], name: str, moment: Tensor) -> None:
    """Write a moment to the place that `_unpack` has read."""
    if f"{name}_scale" not in stored:
        return  # it was written in place
    signed = name == MOMENTS[0]
    codes, scale = encoded(moment.view(-1, BLOCK), code_tables(signed, moment.device), signed)
    stored[name].copy_(codes.view(-1))
    stored[f"{name}_scale"].copy_(scale)


# ---- a step ----------------------------------------------------------------------------------------------------------


def _step(piece: _Piece, compiles: bool, clip: float) -> None:
    """Step a piece, in the compiled kernel if it has 8 bits; the kernel takes whole blocks, two or more."""
    whole = len(piece.weight) // BLOCK
    if compiles and whole > 1 and f"{MOMENTS[0]}_scale" in piece.stored:
        _step_compiled(piece.part(0, whole * BLOCK))
        if whole * BLOCK == len(piece.weight):
            return
        piece = piece.part(whole * BLOCK, len(piece.weight))
    moments = [_unpack(piece.stored, name) for name in MOMENTS]
    _step_plain([piece._replace(stored=dict(zip(MOMENTS, moments, strict=True)))], clip)
    for name, moment in zip(MOMENTS, moments, strict=True):
        _pack(piece.stored, name, moment)


def _step_plain(pieces: list[_Piece], clip: float) -> None:
    """Step pieces of one group with float32 moments together."""
    if not pieces:
        return
    grads, group = [piece.grad for piece in pieces], pieces[0].group
    first, second = ([piece.stored[name][: len(piece.weight)] for piece in pieces] for name in MOMENTS)
    steps = list(torch.stack([piece.step for piece in pieces]))  # copies, which the step increments
    beta1, beta2 = group["betas"]
    adamw([piece.weight for piece in pieces], grads if clip == 1 else list(torch._foreach_mul(grads, clip)), first,
          second, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
          weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)  # fmt: skip


def _rates(group: dict[str, Any], steps: Tensor, clip: float) -> Tensor:
    """Return the numbers that `_kernel` needs of a group and of each parameter's step count: float32 [params, 12].

    They are on the device, rounded once: a new learning rate compiles nothing, and no step waits for the device.
    """
    (beta1, beta2), lr, steps = group["betas"], group["lr"], steps.double() + 1
    columns = [beta1, 1 - beta1, beta2, 1 - beta2, lr * group["weight_decay"], group["eps"],
               lr / (1 - beta1**steps), (1 - beta2**steps).rsqrt(), clip, 0, 0, 0]  # 16-byte rows  # fmt: skip
    return torch.stack([torch.ones_like(steps) * column for column in columns], 1).float()


def _kernel(weight: Tensor, grad: Tensor, first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor,
            rates: Tensor, first_codes: Codes, second_codes: Codes) -> None:  # fmt: skip
    """Run AdamW on `[blocks, BLOCK]` elements, with moments that are read and written in 8 bits; see `_step`."""
    beta1, rest1, beta2, rest2, decay, eps, rate, root, clip = rates.unbind()[:9]
    g, w = grad.float() * clip, weight.float()
    mean = beta1 * decoded(first, first_scale, first_codes) + rest1 * g
    square = beta2 * decoded(second, second_scale, second_codes) + rest2 * g * g
    weight.copy_(w - decay * w - rate * mean / (square.sqrt() * root + eps))
    for codes, scale, (new, new_scale) in (
        (first, first_scale, encoded(mean, first_codes, True)),
        (second, second_scale, encoded(square, second_codes, False)),
    ):
        codes.copy_(new)
        scale.copy_(new_scale)


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_kernel, fullgraph=True)


def _step_compiled(piece: _Piece) -> None:
    """Run `_kernel`, compiled once for any number of blocks; the compiler specializes on a tensor's place in its
    storage."""
    assert piece.rates is not None
    moments = [piece.stored[name + part] for name in MOMENTS for part in ("", "_scale")]
    tensors = [_alone(t) for t in (piece.weight, piece.grad, *moments)]
    tensors = [t if i in (3, 5) else t.view(-1, BLOCK) for i, t in enumerate(tensors)]  # one scale per block
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    device = piece.weight.device
    _compiled()(*tensors, _alone(piece.rates), code_tables(True, device), code_tables(False, device))


def _alone(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that starts where its storage does."""
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
