"""The samples for the comparison of engines, taken from masters that ranks share; nothing else is gathered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from instep.training.hf.shards import box, local
from instep.weights.memory import EngineMemory
from instep.weights.source import Samples


class Sampler:
    """Finds the elements of the masters on this rank that are in the samples of a memory's workers.

    Args:
        masters: by the names of the memory, in one order on all ranks.
    """

    def __init__(self, memory: EngineMemory, masters: Mapping[str, Tensor]):
        self._opened = list(memory.slices)
        self._found: list[tuple[str, str, slice]] = []  # nonce, name, and the bytes of the sample within all
        pieces: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        own: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}
        self._size = 0  # the bytes of all
        for name, master in masters.items():
            dtype: torch.dtype = getattr(torch, memory.dtypes[name])
            known: dict[bytes, slice] = {}  # engines that cut the weight equally have one sample
            for nonce, places in memory.places(name).items():
                key = places.numpy().tobytes()
                if key not in known:
                    at, which = _here(master, places)
                    pieces.setdefault((master.dtype, dtype), []).append((master, at.to(master.device)))
                    bytes_at = self._size + which[:, None] * dtype.itemsize + torch.arange(dtype.itemsize)
                    own.setdefault((master.dtype, dtype), []).append(bytes_at.flatten())
                    known[key] = slice(self._size, self._size + len(places) * dtype.itemsize)
                    self._size = known[key].stop
                if nonce in self._opened:
                    self._found.append((nonce, name, known[key]))
        self._groups = [_Group(dtype, pieces[held, dtype], torch.cat(own[held, dtype])) for held, dtype in pieces]

    @torch.no_grad()
    def samples(self) -> Samples:
        """Return the bytes of the samples of the opened workers, in the dtypes of the weights (collective)."""
        data = torch.zeros(self._size, dtype=torch.uint8, device=self._groups[0].own.device)
        for group in self._groups:
            data[group.own] = group.bytes()
        if dist.get_world_size() > 1:
            dist.all_reduce(data, dist.ReduceOp.MAX)  # a rank has zeros for elements of other ranks
        samples: Samples = {nonce: {} for nonce in self._opened}
        for nonce, name, where in self._found:
            samples[nonce][name] = data[where]
        return samples


class _Group:
    """Masters of one dtype whose weights also have one dtype: one kernel per master takes their elements.

    Args:
        pieces: masters, and flat elements here.
        own: their bytes within all samples.
    """

    def __init__(self, dtype: torch.dtype, pieces: list[tuple[Tensor, Tensor]], own: Tensor):
        self._dtype, self._pieces = dtype, pieces
        self.own = own.to(pieces[0][1].device)

    def bytes(self) -> Tensor:
        sizes = [at.numel() for _, at in self._pieces]
        master = self._pieces[0][0]
        taken = torch.empty(sum(sizes), dtype=master.dtype, device=self.own.device)
        for (master, at), out in zip(self._pieces, taken.split(sizes), strict=True):
            torch.take(local(master), at, out=out)
        return taken.to(self._dtype).view(torch.uint8)


def _here(weight: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of these elements of the flat whole are on this rank, and where in its part."""
    at, inside, step = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool), 1
    for size, length, first in reversed(list(zip(weight.shape, *box(weight), strict=True))):
        coordinate, places = places % size - first, places // size
        inside &= (coordinate >= 0) & (coordinate < length)
        at, step = at + coordinate * step, step * length
    return at[inside], inside.nonzero()[:, 0]
