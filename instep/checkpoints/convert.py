"""`instep convert`: Hugging Face folders to Megatron's `torch_dist` and back, and quantized folders to bfloat16.

One parameter is in memory at a time. The source is read once, through mapped memory. Each written tensor is read back,
and its digest is compared with that of its source. Only then does the folder get its final name. A conversion that is
killed leaves a hidden folder; the next conversion removes it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from torch import Tensor

from instep.checkpoints.folder_names import PLAIN, FolderNames, plain_names
from instep.checkpoints.folders import RELEASE, find_checkpoint, iteration_folder
from instep.checkpoints.hf_export import (
    check_export_folder,
    check_hf_checkpoint,
    copy_companions,
    new_export,
    read_hf_config,
    write_weights,
)
from instep.checkpoints.hf_weights import StoredTensor, opened_weights
from instep.checkpoints.integrity import TRACKER, check_whole
from instep.checkpoints.megatron import MegatronCheckpoint
from instep.checkpoints.megatron_writer import TorchDistWriter
from instep.checkpoints.quantization import quantization_of
from instep.checkpoints.remote_code import load_config
from instep.checkpoints.untrained import specs_of, untrained
from instep.errors import CheckpointError, ConfigError
from instep.models.hub import fetch_weights, folder_of
from instep.models.images import has_language_model, image_names
from instep.models.shape import KNOWN, ModelShape, model_shape
from instep.models.weight_map import Kind, WeightEntry, weight_entries
from instep.system.atomic import sync_folder
from instep.system.options import OptionParser
from instep.training.megatron.weights import check_tensors
from instep.weights.spec import TensorSpec

TO_MEGATRON, TO_HF, TO_BF16 = "hf-to-megatron", "megatron-to-hf", "fp8-to-bf16"
Tell = Callable[[int], None]  # receives how many bytes are done
Tensors = Callable[[WeightEntry], list[Tensor]]  # the Hugging Face tensors of an entry
Digest = tuple[torch.dtype, torch.Size, bytes]  # type, shape, xxh3 (128 bits) of the bytes in memory


def _iteration(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not an iteration: give 0, 1, ...")
    return int(word)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `instep convert`."""
    top = OptionParser("instep convert", description="Convert weights, read them back, and compare all digests.")
    ways = top.add_subparsers(dest="way", required=True, metavar=f"{TO_MEGATRON} | {TO_HF} | {TO_BF16}")
    to_megatron = ways.add_parser(TO_MEGATRON, help="SAVE/release in Megatron's format torch_dist, for any layout")
    to_megatron.add_argument("--hf-checkpoint", type=Path, required=True, help="a folder, or ORG/NAME of the hub")
    to_hf = ways.add_parser(TO_HF, help="a Hugging Face folder from a torch_dist or torch checkpoint of any layout")
    to_hf.add_argument("--load", type=Path, required=True, help=f"the folder with {TRACKER}")
    to_hf.add_argument("--ckpt-step", type=_iteration, help="the iteration of --load; default: the latest")
    to_hf.add_argument("--hf-checkpoint", type=Path, required=True, help="its config.json and tokenizer are copied")
    to_bf16 = ways.add_parser(TO_BF16, help="a Hugging Face folder in bfloat16 from one in FP8, GPTQ or AWQ")
    to_bf16.add_argument("--hf-checkpoint", type=Path, required=True, help="a folder, or ORG/NAME of the hub")
    for way in (to_megatron, to_hf, to_bf16):
        way.add_argument("--save", type=Path, required=True, help="the new folder")
    for way in (to_megatron, to_hf):
        layers = "convert its layers of multi-token prediction, too (N: all that config.json says)"
        way.add_argument("--mtp-num-layers", type=int, default=0, metavar="N", help=layers)
        way.add_argument("--trust-remote-code", action="store_true", help="run the Python files of --hf-checkpoint")
    return top


def main(words: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    options = parser().parse_args(words)
    named, needs_weights = str(options.hf_checkpoint), options.way != TO_HF
    options.hf_checkpoint = Path(folder_of(named, "--hf-checkpoint", weights=needs_weights))
    if needs_weights:
        how = quantization_of(check_hf_checkpoint(options.hf_checkpoint), str(options.hf_checkpoint))
        if options.way == TO_BF16 and how is None:
            what, remedy = "its weights are not quantized", "use it as it is"
            raise ConfigError(what, where=f"--hf-checkpoint {options.hf_checkpoint}", remedy=remedy)
    shape = None if options.way == TO_BF16 else _shape(options.hf_checkpoint, options.trust_remote_code)
    shape = shape and shape.with_mtp(options.mtp_num_layers)
    _check_apart(options.save, *(path for path in (options.hf_checkpoint, getattr(options, "load", None)) if path))
    check_export_folder(options.save, "--save", "conversion")
    console, began = Console(), time.monotonic()
    if shape is None:
        rows = fp8_to_bf16(options.hf_checkpoint, options.save, console)
    elif options.way == TO_MEGATRON:
        rows = hf_to_megatron(options.hf_checkpoint, options.save, shape, console)
    else:
        found = find_checkpoint(options.load, options.ckpt_step)
        if found is None:
            what = f"{options.load} has no {TRACKER}"
            raise ConfigError(what, where="--load", remedy="name the folder that contains iter_* or release")
        check_whole(found[0], tell=console.print)
        if has_language_model(read_hf_config(options.hf_checkpoint)):  # its layers for images are copied
            fetch_weights(str(options.hf_checkpoint), "--hf-checkpoint")
        rows = megatron_to_hf(found[0], options.hf_checkpoint, options.save, shape, console)
    table = Table(show_header=False)
    rows["seconds"] = f"{time.monotonic() - began:,.1f}"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    return 0


def _check_apart(save: Path, *sources: Path) -> None:
    """Refuse a `--save` that would replace what is read, or is inside it. Raises ConfigError."""
    for source in sources:
        ours, read = (Path(os.path.realpath(path)) for path in (save, source))
        if ours == read or ours in read.parents or read in ours.parents:
            how = "is" if ours == read else "contains" if ours in read.parents else "is inside"
            what = f"{save} {how} {source}, which is read"
            raise ConfigError(what, where="--save", remedy="name another folder, outside of what is converted")


def _shape(folder: Path, trusted: bool) -> ModelShape:
    from huggingface_hub.errors import StrictDataclassError

    remedy = "give a folder with the config.json of the model"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", where="--hf-checkpoint", remedy=remedy)
    read_hf_config(folder)  # transformers would explain less of what is wrong
    try:
        config = load_config(str(folder), trusted)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"config.json cannot be read: {error}", where="--hf-checkpoint", remedy=remedy) from error
    try:
        return model_shape(config)
    except ConfigError as error:
        remedy = "--train-backend hf needs no conversion: it reads and writes Hugging Face folders"
        raise ConfigError(error.what, where=error.where, remedy=f"{remedy}; for megatron {KNOWN}") from error


def hf_to_megatron(source: Path, save: Path, shape: ModelShape, console: Console) -> dict[str, str]:
    """Convert the Hugging Face folder `source`: write a `release` folder and its tracker into `save`.

    Returns:
        A summary for the user.

    Raises:
        CheckpointError: weights are unreadable or unknown, the disk is full, or a comparison failed.
    """
    with HuggingFace(source, shape) as weights, _new_folder(save, weights.num_bytes) as new:
        source_of = _Digested(weights.tensors)
        release = iteration_folder(new, RELEASE)
        release.mkdir()
        with _bar(console, "converting", weights.num_bytes) as tell, TorchDistWriter(release, shape) as writer:
            for entry, tensors in zip(weights.entries, _ahead(source_of, weights.entries), strict=True):
                tell(writer.add(entry, tensors))
        (new / TRACKER).write_text("release")
        with _on_disk(new), _bar(console, "comparing", weights.num_bytes) as tell:
            _compare(weights.entries, source_of.digests, MegatronCheckpoint(release, shape).tensors, tell)
    return _figures(source, save / release.name, weights.entries, weights.num_bytes) | _left_out(weights.unread)


def megatron_to_hf(folder: Path, hf: Path, save: Path, shape: ModelShape, console: Console) -> dict[str, str]:
    """Convert the checkpoint `folder` to the Hugging Face folder `save`, with the configuration and tokenizer of `hf`.

    Returns, raises: as `hf_to_megatron`.
    """
    checkpoint = MegatronCheckpoint(folder, shape)
    entries = checkpoint.entries
    specs = [TensorSpec(name, size, checkpoint.dtype(e)) for e in entries for name, size in e.tensors.items()]
    num_bytes = sum(spec.nbytes for spec in specs)
    source_of, names = _Digested(checkpoint.tensors), FolderNames.of(hf)
    with (
        untrained(hf, specs, mtp=False) as images,
        _new_folder(save, num_bytes + sum(spec.nbytes for spec in specs_of(images))) as new,
    ):
        _write(specs, entries, source_of, new, console, names, images)
        copy_companions(hf, new, specs)
        with _on_disk(new), HuggingFace(new, shape) as written, _bar(console, "comparing", num_bytes) as tell:
            _compare(written.entries, source_of.digests, written.tensors, tell)
    return _figures(folder, save, entries, num_bytes) | _left_out(checkpoint.mtp)


def _left_out(names: Sequence[str]) -> dict[str, str]:
    images = image_names(names)
    kinds = {"multi-token prediction": len(names) - len(images), "layers for images": len(images)}
    said = ", ".join(f"{num} tensors of {kind}" for kind, num in kinds.items() if num)
    return {"left out": said} if said else {}


def _write(
    specs: Sequence[TensorSpec],
    entries: Sequence[WeightEntry],
    read: Tensors,
    folder: Path,
    console: Console,
    names: FolderNames = PLAIN,
    images: Mapping[str, StoredTensor] = MappingProxyType({}),
) -> None:
    """Write the tensors that `read` returns for the entries, and `images`, into the files of a Hugging Face folder.

    Args:
        names: of the tensors there.
    """

    def weights(tell: Tell) -> Iterator[Tensor]:
        for tensors in _ahead(read, entries):
            for tensor in tensors:
                yield tensor
                tell(tensor.nbytes)

    with _bar(console, "converting", sum(spec.nbytes for spec in specs)) as tell:
        named = names.tensors(zip(specs, weights(tell), strict=True))
        tensors = (tensor for _, tensor in named if tensor is not None)
        more = (stored.read() for stored in images.values())
        write_weights([*names.specs(specs), *specs_of(images)], chain(tensors, more), folder)


def fp8_to_bf16(source: Path, save: Path, console: Console) -> dict[str, str]:
    """Convert the Hugging Face folder `source` to `save`: quantized tensors become bfloat16, other tensors stay
    unchanged.

    Returns, raises: as `hf_to_megatron`.
    """
    with HuggingFace(source) as weights, _new_folder(save, weights.num_bytes) as new:
        source_of = _Digested(weights.tensors)
        _write(weights.specs, weights.entries, source_of, new, console)
        copy_companions(source, new, weights.specs)
        with _on_disk(new), HuggingFace(new) as written, _bar(console, "comparing", weights.num_bytes) as tell:
            _compare(weights.entries, source_of.digests, written.tensors, tell)
    return _figures(source, save, weights.entries, weights.num_bytes) | {"tensors": f"{len(weights.entries):,}"}


class HuggingFace:
    """A context manager: the weights of the Hugging Face folder `folder`; quantized weights are read as bfloat16.

    Args:
        shape: the shape of their model; None: each tensor is an entry.

    Raises:
        CheckpointError: files are missing or damaged; or tensors are missing, unknown or of another shape.
    """

    def __init__(self, folder: Path, shape: ModelShape | None = None):
        self._stack, self._advised = ExitStack(), set[Path]()
        with self._stack:
            self._stored = self._stack.enter_context(opened_weights(folder, torch.bfloat16))
            images = image_names(self._stored)
            if shape:
                self._stored = plain_names(self._stored)
            self._advice = self._stack.enter_context(ThreadPoolExecutor(1))
            self.unread = [*check_tensors(folder, shape, self._stored), *images] if shape else []
            self._stack = self._stack.pop_all()
        alone = (WeightEntry(n, (n,), (t.shape,), Kind.REPLICATED) for n, t in self._stored.items())
        self.entries = [entry for entry in weight_entries(shape) if not entry.repeats] if shape else list(alone)
        self.specs = [TensorSpec(n, size, self._dtype(n)) for e in self.entries for n, size in e.tensors.items()]
        self.num_bytes = sum(spec.nbytes for spec in self.specs)

    def __enter__(self) -> HuggingFace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensors(self, entry: WeightEntry) -> list[Tensor]:
        """Return the tensors of `entry`, in the order of its names. The kernel reads the first one's file ahead."""
        path = self._stored[entry.names[0]].path
        if path not in self._advised:
            self._advised.add(path)
            self._advice.submit(_read_ahead, path)  # reading page by page would be slow
        return [self._stored[name].read() for name in entry.names]

    def _dtype(self, name: str) -> torch.dtype:
        stored = self._stored[name]
        if stored.dtype is None:
            what, remedy = f"{name} has a type that cannot be converted", "save it in bfloat16, float16 or float32"
            raise CheckpointError(what, where=str(stored.path), remedy=remedy)
        return stored.dtype


def _read_ahead(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # returns when most of it is read


@contextmanager
def _new_folder(save: Path, num_bytes: int) -> Iterator[Path]:
    """Make a folder with `new_export`, or raise an error where there is no room for `num_bytes`."""
    disk = next(p for p in Path(os.path.realpath(save)).parents if p.is_dir())
    if (free := shutil.disk_usage(disk).free) < num_bytes * 1.02:
        what = f"{num_bytes / 1e9:.2f} GB must be written, and {free / 1e9:.2f} GB are free"
        raise CheckpointError(what, where=str(save), remedy="free space, or name a folder on another disk")
    with new_export(save, "conversion") as new:
        yield new


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    """Flush the files of a folder to the disk while the block reads them. Raises OSError."""
    with ThreadPoolExecutor(1) as pool:
        flushed = [pool.submit(sync_folder, path) for path in (*folder.rglob("*"), folder)]  # files, too
        yield
        for done in flushed:
            done.result()


@contextmanager
def _bar(console: Console, title: str, num_bytes: int) -> Iterator[Tell]:
    columns = (TextColumn(f"{title:<10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_bytes)
        yield lambda done: progress.advance(task, done)


def _ahead(read: Tensors, entries: Sequence[WeightEntry]) -> Iterator[list[Tensor]]:
    """Yield what `read` returns for each entry. A thread reads the next one while the caller uses the current one."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(read, entries[0])
        for entry in entries[1:]:
            tensors, coming = coming.result(), pool.submit(read, entry)
            yield tensors
        yield coming.result()


class _Digested:
    """Wraps `read`, and keeps the type, shape and digest of each tensor."""

    def __init__(self, read: Tensors):
        self._read = read
        self.digests: dict[str, Digest] = {}

    def __call__(self, entry: WeightEntry) -> list[Tensor]:
        tensors = self._read(entry)
        for name, tensor in zip(entry.names, tensors, strict=True):
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self.digests[name] = tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(content)
        return tensors


def _compare(entries: Sequence[WeightEntry], source: Mapping[str, Digest], written: Tensors, tell: Tell) -> None:
    """Read each tensor back, and compare its type, shape and digest. Raises CheckpointError if one differs."""
    read = _Digested(written)
    for entry, tensors in zip(entries, _ahead(read, entries), strict=True):
        for name, tensor in zip(entry.names, tensors, strict=True):
            if read.digests[name] != source[name]:
                raise CheckpointError(
                    f"{name} was read back with different bits than were written",
                    where=entry.megatron,
                    remedy="convert again; if it happens again, the disk or the memory of this host is faulty",
                )
            tell(tensor.nbytes)


def _figures(source: Path, to: Path, entries: Sequence[WeightEntry], num_bytes: int) -> dict[str, str]:
    num = sum(len(entry.names) for entry in entries)
    return {
        "from": str(source),
        "to": str(to),
        "tensors": f"{num:,} of Hugging Face's, {len(entries):,} of Megatron's",
        "gigabytes": f"{num_bytes / 1e9:,.2f}",
        "comparison": "all tensors were read back with equal digests of 128 bits",
    }
