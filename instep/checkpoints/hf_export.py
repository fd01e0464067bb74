"""Hugging Face checkpoints: cheap checks of a folder, and an export of live weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.checkpoints.integrity import Kind, contents, is_ours, put_in_place, write_manifest
from instep.checkpoints.weight_files import SINGLE
from instep.errors import CheckpointError, ConfigError
from instep.models.config_file import QUANTIZATION, as_stored, check_types
from instep.models.files import INDEX, weight_map
from instep.models.images import has_language_model
from instep.models.mtp import KEYS, mtp_names, num_mtp_layers
from instep.system.documents import read_json
from instep.system.private import share
from instep.system.scratch import Scratch

if TYPE_CHECKING:
    import torch

    from instep.weights.source import WeightSource
    from instep.weights.spec import TensorSpec

MAX_SHARD_BYTES = 5 * 10**9
_OF_WEIGHTS = (".index.json", "quant_config.json", "quantize_config.json")  # not copied beside others
_COPIED = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}

DTYPES = {  # safetensors' names of torch types
    "torch.float64": "F64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*", "tekken.json", "tokenization_*.py")


def check_causal_lm(config: dict[str, Any], *, where: str) -> None:
    """Refuse a configuration without a decoder-only language model that can be trained.

    Raises:
        ConfigError: the model is an encoder-decoder, or not a causal language model.
    """
    architectures = config.get("architectures") or []
    kind = f"{'/'.join(architectures) or 'no architecture'}, model_type {config.get('model_type')!r}"
    remedy = "give a decoder-only causal language model (architecture ...ForCausalLM)"
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"this is an encoder-decoder model ({kind})", where=where, remedy=remedy)
    causal = any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures) or has_language_model(config)
    if architectures and not causal:
        raise ConfigError(f"this is not a causal language model ({kind})", where=where, remedy=remedy)


def check_hf_checkpoint(path: str | Path) -> dict[str, Any]:
    """Check that a folder is a checkpoint of a causal model, without torch or weights. Return its `config.json`.

    Raises:
        ConfigError: the folder, config.json or weights are missing or bad, or the model is not decoder-only.
    """
    path = Path(path)
    remedy = "give a folder with config.json and safetensors weights, as save_pretrained writes it"
    if not path.is_dir():
        raise ConfigError("this Hugging Face checkpoint is not a folder", where=str(path), remedy=remedy)
    config = read_hf_config(path)
    check_causal_lm(config, where=str(path / "config.json"))
    files = [path / SINGLE]
    if (path / INDEX).exists():
        try:
            files = [path / name for name in sorted(set(weight_map(path).values()))]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{INDEX} cannot be read: {error}", where=str(path / INDEX), remedy=remedy) from error
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        what = f"weights are missing: {', '.join(missing[:3]) or 'the index names no file'}"
        raise ConfigError(what, where=str(path), remedy=remedy)
    return config


def check_regular(folder: Path) -> None:
    """Refuse a folder with pipes, sockets or devices: a process that reads one waits forever. Raises ConfigError."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            what, remedy = f"{path.name} is not a file, but a pipe, a socket or a device", "copy the checkpoint again"
            raise ConfigError(what, where=str(path), remedy=remedy)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder, corrected by its other files (`as_stored`).

    Raises:
        ConfigError: it is missing or not a JSON object, or hf_quant_config.json cannot be read.
    """
    check_regular(folder)
    place, remedy = folder / "config.json", "give a folder with config.json and safetensors weights"
    config = _read_json(place, remedy)
    try:
        check_types(config)
    except ValueError as error:
        raise ConfigError(f"config.json cannot be read: {error}", where=str(place), remedy=remedy) from error
    try:
        return as_stored(config, folder)
    except (OSError, ValueError) as error:
        what, remedy = f"{QUANTIZATION} cannot be read: {error}", "copy or download the checkpoint again"
        raise ConfigError(what, where=str(folder), remedy=remedy) from error


def check_files(path: str | Path, *, needs_chat_template: bool) -> None:
    """Check the headers of the weight files and the tokenizer of a folder that has passed `check_hf_checkpoint`.

    Raises:
        ConfigError: a file is truncated or corrupt, or the tokenizer or a needed chat template is missing.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            what = f"this weight file is damaged: {error}"
            raise ConfigError(what, where=str(file), remedy="copy or download the checkpoint again") from error
    if not any(any(path.glob(name)) for name in _TOKENIZERS):
        what = "the checkpoint has no tokenizer"
        raise ConfigError(what, where=str(path), remedy="copy the tokenizer's files (tokenizer.json, ...) into it")
    if needs_chat_template and not any(any(path.glob(name)) for name in _TEMPLATES):
        settings = path / "tokenizer_config.json"
        if not settings.exists() or not _read_json(settings, "copy it again").get("chat_template"):
            raise ConfigError(
                "--apply-chat-template needs a tokenizer with a chat template; this one does not have one",
                where=f"{path} (chat_template.jinja or tokenizer_config.json)",
                remedy="use an instruct checkpoint, or --chat-template FILE, or remove --apply-chat-template",
            )


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing", where=str(path.parent), remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} is not a JSON object", where=str(path), remedy=remedy)
    return data


def check_export_folder(path: str | Path, flag: str = "--save-hf", kind: Kind = "export") -> None:
    """Refuse a folder for a result of `kind` if it holds more than an earlier result that no one has added to.

    Raises:
        ConfigError: it holds other files, which would be replaced.
    """
    path = Path(path)
    if os.path.lexists(path) and not (path.is_dir() and (not any(path.iterdir()) or is_ours(path, kind))):
        there = contents(path) if path.is_dir() else "it is a file"
        raise ConfigError(
            f"{path} holds more than {'an' if kind == 'export' else 'a'} {kind} of instep ({there}), and "
            f"each {kind} would replace it",
            where=flag,
            remedy="name another folder; or move its content away",
        )


def export_hf(weight_source: WeightSource, src_checkpoint: Path, dst: Path, chat_template: str | None = None) -> None:
    """Write the weights, with configuration, tokenizer and templates of `src_checkpoint`, as the checkpoint `dst`.

    See `exporting`, and `WithUntrained` for the layers that are not trained.

    Args:
        chat_template: the text that replaces the template of `src_checkpoint`.
    """

    def write(weights: Iterator[Any], new: Path) -> None:
        write_weights(weight_source.specs, (tensor for _, tensor in weights), new)
        copy_companions(Path(src_checkpoint), new, weight_source.specs)
        if chat_template is not None:
            (new / "chat_template.jinja").write_text(chat_template)

    exporting(weight_source, dst, write)


def exporting(weight_source: WeightSource, dst: Path, write: Callable[[Iterator[Any], Path], None]) -> None:
    """Call `write` with the tensors of `weight_source` and a new folder, which becomes `dst`.

    This is collective; the rank that emits writes. `dst` is replaced only when everything is on the disk. Only an
    earlier export is replaced: any other content of `dst` is kept beside it.

    Raises:
        CheckpointError: the writing rank could not write, for example on a full disk; `dst` keeps its former content.
    """
    weights = iter(weight_source)
    try:
        if weight_source.emits:
            with new_export(dst) as new:
                write(weights, new)
    finally:
        for _ in weights:  # this rank must take part in the gathering to the end, like the others
            pass


@contextmanager
def new_export(dst: Path, kind: Kind = "export") -> Iterator[Path]:
    """Yield a new folder that becomes `dst` at the end of the block. Remove what a killed process left of one.

    Raises:
        CheckpointError: it could not be written, for example on a full disk; `dst` keeps its former content.
    """
    from safetensors import SafetensorError

    dst = Path(os.path.realpath(dst))
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        with Scratch(".instep-export-", dst.parent) as scratch:
            new = scratch / "new"
            new.mkdir()
            yield new
            write_manifest(new, kind)
            share(new)
            put_in_place(new, dst, dst.with_name(f".{dst.name}.{uuid.uuid4().hex[:8]}.old"), kind)
    except (OSError, SafetensorError) as error:
        what = f"cannot write the checkpoint: {error}"
        raise CheckpointError(what, where=str(dst), remedy="free space, or write elsewhere") from error


def write_weights(specs: Sequence[TensorSpec], weights: Iterable[torch.Tensor], folder: Path) -> None:
    """Write the tensors, in the order of `specs`, into files of at most 5 GB; a larger tensor gets its own file.

    One tensor is in memory at a time.
    """
    import torch

    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    weight_map: dict[str, str] = {}
    tensors = iter(weights)
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with open(folder / name, "wb") as file:
            file.write(_header(shard))
            for _ in shard:
                tensor = next(tensors).detach().cpu().contiguous()
                file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        weight_map.update({spec.name: name for spec in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _header(shard: Sequence[TensorSpec]) -> bytes:
    """Return the start of a safetensors file (https://github.com/huggingface/safetensors#format): a length and JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        start, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": DTYPES[str(spec.dtype)], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8
    return struct.pack("<Q", len(text)) + text


def copy_companions(src: Path, folder: Path, specs: Sequence[TensorSpec]) -> None:
    """Copy the configuration (with the weights' type), tokenizer and templates of `src` beside weights in `folder`."""
    for file in sorted(src.iterdir()):
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(_OF_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    templates = src / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    config = json.loads((src / "config.json").read_text())
    config.pop("quantization_config", None)  # it describes the weights of `src`
    largest = max((spec for spec in specs if spec.dtype.is_floating_point), key=lambda spec: spec.nbytes)
    for part in (config, config["text_config"]) if "text_config" in config else (config,):
        if any(spec.name.endswith("lm_head.weight") for spec in specs):
            part["tie_word_embeddings"] = False
        part["torch_dtype" if "torch_dtype" in part else "dtype"] = str(largest.dtype).removeprefix("torch.")
        if not mtp_names((spec.name for spec in specs), part.get("num_hidden_layers") or 0, num_mtp_layers(part)):
            part |= {key: 0 for key in KEYS if part.get(key)}  # otherwise engines would look for these layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
