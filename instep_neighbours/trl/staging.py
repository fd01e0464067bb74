"""Whole weights from another project's trainer, in shared memory: the place of each tensor, and the received ones.

A version is staged before an engine gets any of it. So a trainer that dies in the middle leaves the engines unchanged.
Two slots are used in turn: one holds the version of the engines, the other the next version. A slot is a few files;
each is a bucket of the way `staged`.
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
from instep_neighbours.trl.receiver import Announced, Place, WrongTensor, dtype_of

ALIGNMENT = 64  # bytes


@dataclass
class Layout:
    """Names and places of all weights of a checkpoint.

    Attributes:
        refusal: why weights are refused; "" otherwise.
        places: by the name in the checkpoint; an update contains each once.
        taken: every name that a trainer may use for a weight, with its shape and the places of its parts. There are
            several if transformers joins several tensors of the checkpoint; there is no place if these cannot be
            separated here, or the weight is tied.
        tied: names of tied weights, which may be missing, with the name that they are tied to.
        vocab_size: of the model.
        sizes: bytes of each file of a slot.
    """

    refusal: str = ""
    places: dict[str, Place] = field(default_factory=dict)
    taken: dict[str, tuple[tuple[int, ...], tuple[Place, ...]]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    vocab_size: int = 1
    sizes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, checkpoint: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False) -> Layout:
        """Return the layout of a checkpoint.

        Args:
            dtype: the dtype of the engines; weights in another dtype are cast.
            bucket_bytes: the approximate size of a file of a slot.
        """
        config = load_config(str(checkpoint), trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        weights, names = named_weights(model), CheckpointNames(model, weight_files(checkpoint))
        layout = cls(vocab_size=int(config.get_text_config().vocab_size))
        for group in names.groups:
            served = dtype_name(weights[group.model[0]].dtype)
            for name, shape in zip(group.checkpoint, group.shapes, strict=True):
                layout.taken[name] = tuple(shape), (layout._add(name, tuple(shape), served, bucket_bytes),)
            if group.converter is None:
                layout.taken[group.model[0]] = layout.taken[group.checkpoint[0]]
            else:
                shapes = {name: tuple(weights[name].shape) for name in group.model if name not in group.checkpoint}
                layout.taken |= {name: (shape, layout._parts(names, group, shape)) for name, shape in shapes.items()}
        first = {id(weight): name for name, weight in weights.items()}
        for name, weight in model.state_dict(keep_vars=True).items():
            if name not in weights and id(weight) in first:
                shape, (place,) = layout.taken[first[id(weight)]]
                layout.taken[name], layout.tied[name] = (shape, ()), place.name
        return layout

    def _add(self, name: str, shape: tuple[int, ...], dtype: str, bucket_bytes: int) -> Place:
        if not self.sizes or self.sizes[-1] >= bucket_bytes:
            self.sizes.append(0)
        place = self.places[name] = Place(name, shape, dtype, len(self.sizes) - 1, self.sizes[-1])
        self.sizes[-1] += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def _parts(self, names: CheckpointNames, group: Group, shape: tuple[int, ...]) -> tuple[Place, ...]:
        """Return the places of a group's tensors, if each is a run of whole rows of the model's single tensor;
        otherwise none.

        A test tensor that holds row numbers shows where the rows go.
        """
        if len(group.model) > 1:
            return ()
        numbers = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(*shape[:-1], 2)
        try:
            parts = names.to_checkpoint(group, {group.model[0]: numbers})
        except (ValueError, RuntimeError, LookupError):  # more than a separation of rows is needed
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


class Slot:
    """The files of one version of the weights, in `folder` of this host's shared memory."""

    def __init__(self, layout: Layout, folder: Path, name: str):
        self.layout = layout
        self.paths = [folder / f"{name}-{i}.bin" for i in range(len(layout.sizes))]

    def allocate(self) -> None:
        """Take the memory, once. Raises SyncError if there is not enough."""
        for path, size in zip(self.paths, self.layout.sizes, strict=True):
            try:
                with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
                    if not os.fstat(file.fileno()).st_size:
                        os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise SyncError(
                    f"two versions of the weights, of {sum(self.layout.sizes) / 1e9:,.2f} GB each, do not fit into "
                    f"shared memory: {error.strerror}",
                    where=str(path.parent),
                    remedy="enlarge /dev/shm (docker: --shm-size), and start the server again",
                ) from error


@dataclass
class Incoming:
    """A version of the weights that is being received, or is complete.

    Attributes:
        slot: where it is staged, from the first tensor on.
        announced: tensors that have come or will come; tied weights, too.
        records: of the received tensors, by name in the checkpoint.
        tied: the digests of tied weights that were sent, by their own name.
    """

    layout: Layout
    slot: Slot | None = None
    announced: set[str] = field(default_factory=set)
    records: dict[str, TensorRecord] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def announce(self, name: str, dtype: str, shape: tuple[int, ...]) -> Announced:
        """Check a tensor that will come, and return its places. Raises WrongTensor."""
        layout = self.layout
        if name not in layout.taken:
            some = ", ".join(list(layout.places)[:2])
            raise WrongTensor(f"{name} is not a weight of this model. Its weights are {some}, ...")
        expected, places = layout.taken[name]
        if not places and name not in layout.tied:
            raise WrongTensor(f"{name} joins several tensors of the checkpoint, and cannot be separated here")
        served = (places[0] if places else layout.places[layout.tied[name]]).dtype
        keys = {p.name for p in places} or {name}
        if not keys.isdisjoint(self.announced):
            raise WrongTensor(f"{name} came twice in this update")
        if shape != expected:
            raise WrongTensor(f"{name} has shape {list(shape)}, the model's has {list(expected)}")
        if not dtype_of(dtype).is_floating_point and dtype.removeprefix("torch.") != served:
            raise WrongTensor(f"{name} is of {dtype}, the model's of {served}")
        self.announced |= keys
        return Announced(name, dtype, shape, served, places)

    def announce_all(self, infos: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Announced], str]:
        """Return the announced tensors, and what is wrong about the first one that does not belong here.

        Args:
            infos: name, dtype and shape of each, as a trainer has sent them.

        Raises:
            BadRequest: one is malformed, so the number of bytes is unknown.
        """
        what, wrong = [], ""
        for name, dtype, shape in infos:
            numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
            known = isinstance(dtype, str) and isinstance(
                getattr(torch, dtype.removeprefix("torch."), None), torch.dtype
            )
            if not isinstance(name, str) or not known or not numbers:
                raise BadRequest(f"{name!r}, {dtype!r}, {shape!r}: a name, a dtype of torch and a shape are expected")
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

    @property
    def begun(self) -> bool:
        """Return whether a weight has come, or will come, that is not only tied to another one."""
        return not self.announced <= self.layout.tied.keys()

    def take(self, what: Announced, digests: Sequence[str], finite: bool) -> None:
        """Record a received tensor. Raises SyncError for one that is not finite."""
        if not finite:
            raise SyncError(
                f"{what.name} is not finite in {what.served}: it holds NaN or infinity",
                where="the trainer",
                remedy="its training has diverged, or it gathers its weights wrongly; the engines keep the old weights",
            )
        if not what.places:
            self.tied[what.name] = digests[0]
        for p, digest in zip(what.places, digests, strict=False):
            self.records[p.name] = TensorRecord(p.name, p.shape, p.dtype, p.offset, p.nbytes, digest)

    def forget_tied(self, known: dict[str, TensorRecord]) -> None:
        """Drop tied weights that belong to an earlier version."""
        for name in [n for n, digest in self.tied.items() if known[self.layout.tied[n]].digest == digest]:
            del self.tied[name]
            self.announced.discard(name)

    def check_tied(self) -> None:
        """Compare received tied weights with the weights that they are tied to. Raises SyncError if they differ."""
        for name, digest in self.tied.items():
            target = self.layout.tied[name]
            if self.records[target].digest != digest:
                raise SyncError(
                    f"{name} differs from {target}, but the served model ties them",
                    where="the trainer",
                    remedy="train the same model: tie_word_embeddings is true in the served config.json",
                )

    # ---- a whole version takes the place of a session's workers ------------------------------------------------------

    def watch(self) -> None:
        """Do nothing: there is no process to watch, all is in memory."""

    def publish(self, way: str, order: Order, timeout: float, on_event: Callable[[Any], None]) -> None:
        """Publish the buckets of its slot."""
        assert self.slot is not None
        for number, path in enumerate(self.slot.paths):
            names = (p.name for p in self.layout.places.values() if p.number == number)
            records = tuple(self.records[name] for name in names)
            on_event(BucketManifest(str(path), order.version, order.nonce, records))
