"""The samples by which engines are compared, taken from masters that ranks share; nothing else of them is gathered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from instep.training.hf.shards import box, local
from instep.weights.memory import EngineMemory
from instep.weights.source import Samples


class Sampler:
    """Which elements of the masters here are in the samples of the workers of a memory.

    Args:
        masters: by the names of the memory, in one order on all ranks.
    """

    def __init__(self, memory: EngineMemory, masters: Mapping[str, Tensor]):
        self._opened = list(memory.slices)
        self._pieces: list[tuple[Tensor, Tensor, torch.dtype]] = []  # master, flat elements here, dtype of the weight
        self._found: list[tuple[str, str, slice]] = []  # nonce, name, and the bytes of the sample among those of all
        self._size, own = 0, []  # the bytes of all, and which of them are of the pieces
        for name, master in masters.items():
            dtype: torch.dtype = getattr(torch, memory.dtypes[name])
            known: dict[bytes, slice] = {}  # engines that cut the weight alike have one sample
            for nonce, places in memory.places(name).items():
                key = places.numpy().tobytes()
                if key not in known:
                    at, which = _here(master, places)
                    self._pieces.append((master, at.to(master.device), dtype))
                    own.append((self._size + which[:, None] * dtype.itemsize + torch.arange(dtype.itemsize)).flatten())
                    known[key] = slice(self._size, self._size + len(places) * dtype.itemsize)
                    self._size = known[key].stop
                if nonce in self._opened:
                    self._found.append((nonce, name, known[key]))
        self._own = torch.cat(own).to(self._pieces[0][0].device)

    @torch.no_grad()
    def samples(self) -> Samples:
        """The bytes of the samples of the opened workers, in the dtypes of the weights (collective)."""
        mine = [local(master).take(at).to(dtype).view(torch.uint8) for master, at, dtype in self._pieces]
        data = torch.zeros(self._size, dtype=torch.uint8, device=self._own.device)
        data[self._own] = torch.cat(mine)
        if dist.get_world_size() > 1:
            dist.all_reduce(data, dist.ReduceOp.MAX)  # a rank has zeros for what it does not hold
        samples: Samples = {nonce: {} for nonce in self._opened}
        for nonce, name, where in self._found:
            samples[nonce][name] = data[where]
        return samples


def _here(weight: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Of elements of the flat whole those that lie here: where in what this rank holds, and which they are."""
    at, inside, step = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool), 1
    for size, length, first in reversed(list(zip(weight.shape, *box(weight), strict=True))):
        coordinate, places = places % size - first, places // size
        inside &= (coordinate >= 0) & (coordinate < length)
        at, step = at + coordinate * step, step * length
    return at[inside], inside.nonzero()[:, 0]
