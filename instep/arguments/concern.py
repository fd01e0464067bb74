"""The parts of a concern's file (data, rollout, cluster, ...): a `FlagGroup`, resolvers and rules.

A resolver has the name of an attribute, and returns its value. In this way the default of a flag follows from other
flags. A rule reads attributes, and yields what is wrong with them or raises a ConfigError. Neither sets an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from instep.arguments.settings import Settings as Settings
from instep.errors import ConfigError
from instep.system.documents import parse_yaml


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what, at which flag, and what to do.

    Attributes:
        refused: if False, the run starts anyway, and the problem becomes a note to the user.
    """

    what: str
    where: str
    remedy: str = ""
    refused: bool = True


Given = Mapping[str, Any]  # the values of the flags that were given, by attribute
Resolver = Callable[[Settings, Given], Any]
Rule = Callable[[Settings, set[str]], Iterator[Problem]]  # the set: the attributes of the flags that were given


def ranks_of_a_copy(args: Settings) -> int:
    """Return the number of trainer ranks that hold one copy of the model and work on the same samples."""
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    return prod(sizes)


def read_yaml(path: str, where: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file; {} for other content. Raises: ConfigError: the file cannot be read."""
    try:
        content = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot be read: {why}", where=where, remedy="give a readable YAML file") from None
    return content if isinstance(content, dict) else {}


def flag_name(attribute: str) -> str:
    """Return the flag of an attribute that has the flag's name."""
    return "--" + attribute.replace("_", "-")
