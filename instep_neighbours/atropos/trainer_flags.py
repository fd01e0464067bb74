"""The flags of Atropos' `example_trainer/grpo.py`, by the table in `trainer_flags.toml`."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instep.errors import ConfigError
from instep.system.options import OptionParser

COMMAND = "instep atropos-train"
WITH_ADAPTER = ("lora_only", "lora_restart")
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))


def layer_indices(text: str) -> list[int]:
    """Return the numbers of `0-3,28-31`, each once, in order. Raises ArgumentTypeError."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(first) > int(last)):
            raise argparse.ArgumentTypeError(f"{part!r} is not a layer or a range of layers; write 0-3,28-31")
        found.update(range(int(first), int(last if dash else first) + 1))
    if not found:
        raise argparse.ArgumentTypeError("names no layer; write 0-3,28-31")
    return sorted(found)


def positive(text: str) -> int:
    """Return an integer above 0. Raises ArgumentTypeError."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


TYPES: dict[str, Callable[[str], Any]] = {"positive": positive, "layers": layer_indices, "int": int, "float": float}


def parser() -> argparse.ArgumentParser:
    made = OptionParser(COMMAND, description=_TABLE["description"], epilog=_TABLE["epilog"], allow_abbrev=False)
    for title, flags in _TABLE["flags"].items():
        group = made.add_argument_group(title)
        for names, about in flags.items():
            group.add_argument(*names.split(), **about | ({"type": TYPES[about["type"]]} if "type" in about else {}))
    return made


def read(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags with their defaults, without those that are refused.

    Raises:
        ConfigError: a flag is unknown, or refused.
    """
    made = parser()
    flags, unknown = made.parse_known_args([dashed(word) for word in words])
    if unknown:
        name = unknown[0].partition("=")[0]
        like = difflib.get_close_matches(name, made._option_string_actions, n=1)
        remedy = f"did you mean {like[0]}?" if like else f"`{COMMAND} --help` lists the flags"
        raise ConfigError(f"there is no {name}", where=COMMAND, remedy=remedy)
    adapter = flags.weight_bridge_mode in WITH_ADAPTER
    adafactor = flags.adafactor_scale_parameter or flags.adafactor_relative_step
    refused = {
        "--single-copy": flags.single_copy and adapter,
        "--optimizer adafactor": flags.optimizer == "adafactor" or adafactor,
        "--dtype float16": flags.dtype == "float16",
        "--lora-dropout": flags.lora_dropout,
        "--num-inference-nodes": flags.num_inference_nodes > 0,
        "--train-layer-indices": flags.train_layer_indices and adapter,
        "--trainer-rank": not 0 <= flags.trainer_rank < flags.world_size,
        "--checkpoint-interval": flags.checkpoint_interval < 0,
        "--warmup-steps": flags.warmup_steps < 0,
    }
    for name in filter(refused.get, refused):
        why, instead = _TABLE["refused"][name]
        raise ConfigError(why.format(**vars(flags)), where=f"{COMMAND} {name}", remedy=instead)
    if flags.single_copy:
        flags.weight_bridge_mode = "shared_vllm"
    return flags


def dashed(word: str) -> str:
    """Return a word with `-` for `_` in the name of its flag."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
