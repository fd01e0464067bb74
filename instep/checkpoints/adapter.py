"""LoRA adapters as files: peft's format, and the base model of an adapter.

DIR/adapter_config.json         peft's: rank, alpha, the names of the adapted layers
DIR/adapter_model.safetensors   the tensors, under peft's names, in float32
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.arguments.settings import LoraSettings
from instep.checkpoints.hf_export import exporting
from instep.checkpoints.integrity import folder_digest
from instep.checkpoints.weight_files import opened
from instep.errors import CheckpointError
from instep.models.shape import EXPERTS
from instep.system.documents import read_json

if TYPE_CHECKING:
    import torch

    from instep.weights.source import WeightSource

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LAYOUT = "lora.json"  # in a checkpoint that holds an adapter without its base


@dataclass(frozen=True)
class Lora:
    """The values of `--lora-rank` and its companion flags. `targets` are names of layers, or last parts of names."""

    rank: int
    alpha: int
    targets: tuple[str, ...] | None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def config(self, modules: list[str], base: str) -> dict[str, Any]:
        """Return the content of peft's `adapter_config.json` for the adapted `modules` of the model `base`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": modules,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


def lora_of(args: LoraSettings) -> Lora | None:
    """Return the adapter that the arguments ask for; None if all weights are trained."""
    if not args.lora_rank:
        return None
    return Lora(args.lora_rank, args.lora_alpha or 2 * args.lora_rank, tuple(args.lora_target_modules or ()) or None)


# ---- an adapter alone, as peft writes and reads it -------------------------------------------------------------------


def export_adapter(source: WeightSource, config: dict[str, Any], dst: Path) -> None:
    """Write the adapter that `source` yields as the folder `dst`; collective. See `export_hf`."""

    def write(weights: Iterator[Any], new: Path) -> None:
        from safetensors.torch import save_file

        tensors = {spec.name: tensor.detach().to("cpu", copy=True).contiguous() for spec, tensor in weights}
        save_file(tensors, new / TENSORS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    exporting(source, dst, write)


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by peft's names. Raises CheckpointError if there is no readable adapter."""
    with opened(folder / TENSORS) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


# ---- the base of an adapter in a run's checkpoint --------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The identity of a base model: its path when the run read it, and a digest of its files of weights."""

    path: str
    digest: str


def base_of(folder: Path) -> Base:
    """Return the identity of the base in a Hugging Face folder, or in a checkpoint that instep saved."""
    patterns = ("*.safetensors", "*.distcp", "mp_rank_*/*")  # the last: --ckpt-format torch
    files: list[Path] = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
    return Base(str(folder), folder_digest(files))


def write_layout(folder: Path, lora: Lora, modules: list[str], base: Base) -> None:
    content = {"rank": lora.rank, "alpha": lora.alpha, "modules": modules, "base": asdict(base)}
    (folder / LAYOUT).write_text(json.dumps(content, indent=2) + "\n")


def read_layout(folder: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says about its adapter; None if it holds all weights.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = folder / LAYOUT
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = read_json(path)
        found = {name: content[name] for name in ("rank", "alpha", "modules", "base")}
        texts = [*found["modules"], *asdict(Base(**found["base"])).values()]
        if not all(isinstance(text, str) for text in texts) or not isinstance(found["modules"], list):
            raise TypeError("names of modules, and the base, are texts")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it does not say what its adapter is: {error!r}"
        raise CheckpointError(what, where=str(path), remedy="take another checkpoint") from error


def check_layout(folder: Path, lora: Lora | None, modules: list[str], base: Base | None) -> bool:
    """Compare what the checkpoint `folder` holds with the model that will read it.

    Args:
        lora, modules: the adapter of the model; None if it has none.
        base: the base that the model has read; None before it is read.

    Returns:
        True if the checkpoint holds an adapter, False if it holds all weights.

    Raises:
        CheckpointError: its adapter has another rank, alpha, layers or base; or the model needs all weights.
    """
    found = read_layout(folder)
    if found is None:
        return False
    theirs = Base(**found["base"])
    if lora is None or base is None:
        what = f"it holds only a LoRA adapter of {theirs.path}"
        remedy = "give a merged export (--save-hf); or continue the adapter: --load it with the flags of its run"
        raise CheckpointError(what, where=str(folder), remedy=remedy)
    for name, ours, flag in (
        ("rank", lora.rank, "--lora-rank"),
        ("alpha", lora.alpha, "--lora-alpha"),
        ("modules", modules, "--lora-target-modules"),
    ):
        if found[name] != ours:
            there, here, remedy = found[name], ours, f"give {flag} {found[name]}"
            if name == "modules":
                there, here = len(there), len(modules)
                targets = {EXPERTS if f".{EXPERTS}." in n else n.rpartition(".")[2] for n in found[name]}
                remedy = f"give {flag} {' '.join(sorted(targets))}"
            what = f"its adapter differs: {name} {there} there, {here} here"
            raise CheckpointError(what, where=str(folder), remedy=remedy)
    if theirs.digest != base.digest:
        raise CheckpointError(
            f"its adapter belongs to another base: {theirs.path}, not {base.path} (digests {theirs.digest[:12]} and "
            f"{base.digest[:12]})",
            where=str(folder),
            remedy=f"name its base: --hf-checkpoint or --ref-load {theirs.path}",
        )
    return True
