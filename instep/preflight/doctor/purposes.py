"""Checks by purpose: for what a user wants to do, which packages are missing, and the one command that brings them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from instep.observability.versions import package_version
from instep.preflight.doctor.check import Check, Status
from instep.preflight.install.packages import BESIDE
from instep.system.gpus import no_driver

# The tested versions (pyproject.toml).
_MODELS = {"torch": ">=2.11,<2.14", "transformers": ">=5.17,<6", "tokenizers": ">=0.22", "safetensors": ">=0.6"}


@dataclass(frozen=True)
class Purpose:
    """What a user may want to do.

    Attributes:
        needs: versions that work, by the name of the package; an empty text means all.
        install: the name for `instep install`; empty: the one of this machine, `cpu` or `cuda`.
    """

    title: str
    needs: Mapping[str, str]
    install: str = ""


PURPOSES = {
    "cpu": Purpose("train on a CPU", _MODELS, "cpu"),
    "cuda": Purpose("train on NVIDIA GPUs", _MODELS, "cuda"),
    "megatron": Purpose("--train-backend megatron", {**_MODELS, "megatron-core": "==0.16.1"}),
    "vllm": Purpose("--rollout-backend vllm", {"vllm": ">=0.26", "vllm-router": ""}, "vllm"),
    "sglang": Purpose("--rollout-backend sglang", {"sglang": ">=0.5.17", "sglang-router": ""}, "sglang"),
    "ray": Purpose("--cluster ray, for several hosts", {"ray": ""}, "ray"),
    "trl": Purpose("TRL's trainers with engines of instep", {"trl": ">=1.10"}, "trl"),
    "tensorboard": Purpose("--use-tensorboard", {"tensorboard": ""}),
    "wandb": Purpose("--use-wandb", {"wandb": ""}, "wandb"),
    "trackio": Purpose("--use-trackio", {"trackio": ""}, "trackio"),
    "math": Purpose("--rm-type math", {"math-verify": ""}),
    "parquet": Purpose("parquet files", {"pyarrow": ""}),
    "datasets": Purpose("data sets by name", {"datasets": ""}, "datasets"),
}


def check_purposes(wanted: Sequence[str]) -> Iterator[Check]:
    """Yield a check for each purpose. What is missing is `absent`, or `fail` for the purposes in `wanted`."""
    for name, purpose in PURPOSES.items():
        missing = [*_missing(purpose.needs)]
        remedy = f"instep install {purpose.install or ('cpu' if no_driver() else 'cuda')}"
        if name == "trl" and missing and (beside := Path(f"{sys.prefix}-{BESIDE['trl']}/bin/python")).exists():
            yield Check("for trl", "ok", f"{purpose.title}: in {beside}")
            continue
        if name == "cuda" and no_driver():
            missing, remedy = ["the NVIDIA driver", *missing], f"install NVIDIA's driver, then: {remedy}"
        elif name == "cuda" and "+cpu" in (package_version("torch") or ""):
            missing, remedy = ["torch's build for CUDA"], "pip uninstall torch, then: instep install cuda"
        if missing:
            status: Status = "fail" if name in wanted else "absent"
            yield Check(f"for {name}", status, f"{purpose.title}: {', '.join(missing)} missing", remedy)
        else:
            found = ", ".join(f"{package} {package_version(package)}" for package in purpose.needs)
            yield Check(f"for {name}", "ok", f"{purpose.title}: {found}")


def _missing(needs: Mapping[str, str]) -> Iterator[str]:
    from packaging.specifiers import SpecifierSet  # matplotlib brings it

    for package, versions in needs.items():
        found = package_version(package)
        if found is None:
            yield package
        elif found not in SpecifierSet(versions, prereleases=True):
            yield f"{package}{versions} (here is {found})"
