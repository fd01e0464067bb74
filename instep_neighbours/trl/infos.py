"""What the requests of a trainer say of an update: how its tensors come, which they are, and which are missing."""

from __future__ import annotations

from typing import Any

from instep_neighbours.trl.clients import Refused
from instep_neighbours.trl.receiver import PACKED_BYTES
from instep_neighbours.trl.staging import Incoming
from instep_neighbours.trl.tensors import Announced, WrongTensor


def packed_bytes_of(info: dict[str, Any]) -> int | None:
    """How the tensors come, by `packed` and `packed_buffer_size_bytes` of an info; None: one by one."""
    size = info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if type(size) is not int or size < 1:
        raise Refused("packed_buffer_size_bytes must be a whole number above 0", 400)
    return size if info.get("packed", False) else None


def announced_of(incoming: Incoming, infos: Any) -> tuple[list[Announced], str]:
    """What comes, and what is wrong about the first tensor that does not belong here. Raises Refused for no tensors."""
    what, wrong = [], ""
    for name, dtype, shape in infos:
        try:
            numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
            if not isinstance(name, str) or not isinstance(dtype, str) or not numbers:
                raise Refused(f"{name!r}, {dtype!r}, {shape!r}: a name, a dtype and a shape are expected", 400)
            one = Announced(name, dtype, tuple(shape), dtype)
            _ = one.nbytes
            try:
                one = incoming.announce(name, dtype, tuple(shape))
            except WrongTensor as error:
                wrong = wrong or str(error)
            what.append(one)
        except WrongTensor as error:  # of a dtype: nobody knows how many bytes come
            raise Refused(str(error), 400) from error
    return what, wrong


def check_whole(incoming: Incoming) -> None:
    if missing := incoming.missing:
        raise Refused(
            f"{len(missing)} of {len(incoming.layout.places)} weights did not come: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}. An update brings all of them (a trainer of adapters merges them "
            "first); this one is dropped, and the engines keep their weights"
        )
