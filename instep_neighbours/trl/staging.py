"""Whole weights from somebody else's trainer, in shared memory: where each tensor goes, and what has come.

A version is staged before an engine sees any of it, so that a trainer that dies in the middle leaves the engines as
they are. Two slots take turns: one holds the version that the engines have, the other the one that comes. A slot is a
few files, each of them a bucket of the way `staged`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from instep.checkpoints.remote_code import load_config
from instep.checkpoints.weight_files import weight_files
from instep.errors import SyncError
from instep.models.checkpoint_names import CheckpointNames, Group, named_weights
from instep.weights.way import Order
from instep_engine.manifest import BucketManifest, TensorRecord, dtype_name
from instep_neighbours.trl.clients import BadRequest, Refused
from instep_neighbours.trl.receiver import PACKED_BYTES, Announced, Place, WrongTensor, dtype_of

ALIGNMENT = 64  # bytes


class Layout:
    """Names and places of all weights of a checkpoint.

    Args:
        dtype: that the engines compute with; a weight that comes in another one is cast.
        bucket_bytes: about how large a file of a slot is.

    Attributes:
        places: by the name in the checkpoint; an update brings each of them once.
        names: every name by which a trainer may send a weight, with the one in the checkpoint.
        vocab_size: of the model.
        tied: names of tied weights, which may be left out, with the one that they are tied to.
        fused: names under which transformers holds several tensors of the checkpoint as one, with its shape and the
            place of each; with none where it is not taken apart here.
        sizes: bytes of each file of a slot.
        refusal: why no weights are taken; "" otherwise.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False):
        self.refusal = ""
        config = load_config(str(checkpoint), trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        weights, names = named_weights(model), CheckpointNames(model, weight_files(checkpoint))
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.places: dict[str, Place] = {}
        self.names: dict[str, str] = {}
        self.fused: dict[str, tuple[tuple[int, ...], tuple[Place, ...]]] = {}
        self.sizes: list[int] = []
        for group in names.groups:
            served = dtype_name(weights[group.model[0]].dtype)
            for name, shape in zip(group.checkpoint, group.shapes, strict=True):
                self._add(name, tuple(shape), served, bucket_bytes)
                self.names[name] = name
            if group.converter is None:
                self.names[group.model[0]] = group.checkpoint[0]
            else:
                shapes = {name: tuple(weights[name].shape) for name in group.model if name not in group.checkpoint}
                self.fused |= {name: (shape, self._parts(names, group, shape)) for name, shape in shapes.items()}
        first = {id(weight): name for name, weight in weights.items()}
        state = model.state_dict(keep_vars=True)
        self.tied = {n: self.names[first[id(w)]] for n, w in state.items() if n not in weights and id(w) in first}

    def _parts(self, names: CheckpointNames, group: Group, shape: tuple[int, ...]) -> tuple[Place, ...]:
        """The places of a group's tensors, if each is a run of whole rows of the model's only one; else none.

        What becomes of the rows shows a tensor that holds their numbers.
        """
        if len(group.model) > 1:
            return ()
        numbers = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(*shape[:-1], 2)
        try:
            parts = names.to_checkpoint(group, {group.model[0]: numbers})
        except (ValueError, RuntimeError, LookupError):  # it takes more than rows apart
            return ()
        out = []
        for name, part in zip(group.checkpoint, parts, strict=True):
            place, rows = self.places[name], part[..., 0].reshape(-1)
            first = int(rows[0])
            in_order = torch.equal(rows, torch.arange(first, first + len(rows)))
            if not in_order or place.shape != (*part.shape[:-1], shape[-1]):
                return ()
            out.append(replace(place, first=first * shape[-1]))
        return tuple(out)

    @classmethod
    def none(cls, why: str) -> Layout:
        """That of a server which takes no weights."""
        layout = cls.__new__(cls)
        layout.refusal, layout.vocab_size = why, 1
        layout.places, layout.names, layout.tied, layout.fused, layout.sizes = {}, {}, {}, {}, []
        return layout

    def _add(self, name: str, shape: tuple[int, ...], dtype: str, bucket_bytes: int) -> None:
        if not self.sizes or self.sizes[-1] >= bucket_bytes:
            self.sizes.append(0)
        place = self.places[name] = Place(name, shape, dtype, len(self.sizes) - 1, self.sizes[-1])
        self.sizes[-1] += -(-place.nbytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """The files of one version of the weights, in `folder` of this host's shared memory."""

    def __init__(self, layout: Layout, folder: Path, name: str):
        self.layout = layout
        self.paths = [folder / f"{name}-{i}.bin" for i in range(len(layout.sizes))]

    def allocate(self) -> None:
        """Take the memory, once. Raises SyncError where there is not enough."""
        for path, size in zip(self.paths, self.layout.sizes, strict=True):
            if path.exists():
                continue
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                path.unlink()
                raise SyncError(
                    f"two versions of the weights, of {sum(self.layout.sizes) / 1e9:,.2f} GB each, do not fit into "
                    f"shared memory: {error.strerror}",
                    where=str(path.parent),
                    remedy="enlarge /dev/shm (docker: --shm-size), and start the server anew",
                ) from error
            finally:
                os.close(fd)

    def placed(self, what: Announced) -> Announced:
        """A tensor that is to come into this slot."""
        return replace(what, places=tuple(replace(p, path=str(self.paths[p.number])) for p in what.places))


@dataclass
class Incoming:
    """An update that is under way: the records of what has come, by name in the checkpoint.

    Attributes:
        slot: where it is staged, from the first tensor on.
        announced: what has come or is to come; of tied weights, too.
        tied: the digests of tied weights that were sent, by their own name.
    """

    layout: Layout
    slot: Slot | None = None
    announced: set[str] = field(default_factory=set)
    records: dict[str, TensorRecord] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def announce(self, name: str, dtype: str, shape: tuple[int, ...]) -> Announced:
        """Check a tensor that is to come, and say where it goes. Raises WrongTensor."""
        layout = self.layout
        known, tied = layout.names.get(name), layout.tied.get(name)
        if known or tied:
            place = layout.places[known or str(tied)]
            expected, places = place.shape, tuple([place] if known else [])
        elif name in layout.fused:
            expected, places = layout.fused[name]
            if not places:
                raise WrongTensor(f"{name} is several tensors of the checkpoint in one, and is not taken apart here")
            place = places[0]
        else:
            some = ", ".join(list(layout.places)[:2])
            raise WrongTensor(f"{name} is no weight of this model, whose weights are {some}, ...")
        keys = {p.name for p in places} or {name}
        if not keys.isdisjoint(self.announced):
            raise WrongTensor(f"{name} came twice in this update")
        if tuple(shape) != expected:
            raise WrongTensor(f"{name} has shape {list(shape)}, the model's has {list(expected)}")
        if not dtype_of(dtype).is_floating_point and dtype.removeprefix("torch.") != place.dtype:
            raise WrongTensor(f"{name} is of {dtype}, the model's of {place.dtype}")
        self.announced |= keys
        return Announced(name, dtype, tuple(shape), place.dtype, places)

    def announce_all(self, infos: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Announced], str]:
        """What comes, and what is wrong about the first tensor that does not belong here.

        Args:
            infos: name, dtype and shape of each, as a trainer has sent them.

        Raises:
            Refused: one is none, or of an unknown dtype, so that nobody knows how many bytes come.
        """
        what, wrong = [], ""
        for name, dtype, shape in infos:
            numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
            if not isinstance(name, str) or not isinstance(dtype, str) or not numbers:
                raise BadRequest(f"{name!r}, {dtype!r}, {shape!r}: a name, a dtype and a shape are expected")
            try:
                dtype_of(dtype)
            except WrongTensor as error:
                raise BadRequest(str(error)) from error
            try:
                what.append(self.announce(name, dtype, tuple(shape)))
            except WrongTensor as error:
                wrong = wrong or str(error)
                what.append(Announced(name, dtype, tuple(shape), dtype))
        return what, wrong

    def check_whole(self) -> None:
        """Raise Refused if a weight is missing."""
        if missing := self.missing:
            raise Refused(
                f"{len(missing)} of {len(self.layout.places)} weights did not come: {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}. An update brings all of them (a trainer of adapters merges "
                "them first); this one is dropped, and the engines keep their weights"
            )

    @property
    def missing(self) -> list[str]:
        return [name for name in self.layout.places if name not in self.announced]

    def take(self, what: Announced, digests: Sequence[str], finite: bool) -> None:
        """Take note of a tensor that has come. Raises SyncError for one that is not finite."""
        if not finite:
            raise SyncError(
                f"{what.name} is not finite in {what.served}: it holds NaN or infinity",
                where="the trainer",
                remedy="its training has diverged, or it gathers its weights wrongly; the engines keep the old ones",
            )
        if not what.places:
            self.tied[what.name] = digests[0]
        for p, digest in zip(what.places, digests, strict=False):
            self.records[p.name] = TensorRecord(p.name, p.shape, p.dtype, p.offset, p.nbytes, digest)

    @property
    def begun(self) -> bool:
        """Whether a weight has come, or is to come, that is not merely tied to another one."""
        return not self.announced <= self.layout.tied.keys()

    def forget_tied(self, known: dict[str, TensorRecord]) -> None:
        """Forget tied weights that are what those of an earlier version are tied to."""
        for name in [n for n, digest in self.tied.items() if known[self.layout.tied[n]].digest == digest]:
            del self.tied[name]
            self.announced.discard(name)

    def check_tied(self) -> None:
        """Compare tied weights that were sent with what they are tied to. Raises SyncError where they differ."""
        for name, digest in self.tied.items():
            target = self.layout.tied[name]
            if self.records[target].digest != digest:
                raise SyncError(
                    f"{name} is not {target}, to which the model that is served ties it",
                    where="the trainer",
                    remedy="train the same model: tie_word_embeddings is true in the config.json that is served",
                )


class StagedWeights:
    """Stands where a session has a trainer's workers: it publishes the buckets of one slot."""

    def __init__(self, slot: Slot, records: dict[str, TensorRecord]):
        self.slot, self.records = slot, records

    def watch(self) -> None:
        """There is no process to watch: all of it lies in memory."""

    def publish(self, way: str, order: Order, timeout: float, on_event: Callable[[Any], None]) -> None:
        for number, path in enumerate(self.slot.paths):
            names = (p.name for p in self.slot.layout.places.values() if p.number == number)
            records = tuple(self.records[name] for name in names)
            on_event(BucketManifest(str(path), order.version, order.nonce, records))


def packed_bytes_of(info: dict[str, Any]) -> int | None:
    """How the tensors come, by `packed` and `packed_buffer_size_bytes` of an info; None: one by one. Raises Refused."""
    size = info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if type(size) is not int or size < 1:
        raise BadRequest("packed_buffer_size_bytes must be a whole number above 0")
    return size if info.get("packed", False) else None
