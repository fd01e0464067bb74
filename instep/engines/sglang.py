"""The kind `sglang`: engines of an installed SGLang."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from instep.engines.flags import given_names
from instep.engines.kind import Capabilities, EngineKind
from instep.errors import ConfigError

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

READS_VLLM = "--rollout-backend vllm, which reads the flags that have an equivalent there"


class SglangKind(EngineKind):
    """Engines of the installed SGLang."""

    name, title = "sglang", "SGLang"
    own_gpus = needs_router = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.title, version_spans=False)

    def meant_by(self, args: Settings) -> str:
        return ", ".join(args.sglang_flags)

    def refusals(self, args: Settings) -> Iterator[ConfigError]:
        """Yield an error about flags that only vLLM has."""
        if names := given_names(args):
            yield ConfigError(
                "a run has engines of one kind, SGLang's or vLLM's",
                where=f"{', '.join(names)} beside {self.meant_by(args) or '--rollout-backend sglang'}",
                remedy=f"use SGLang's flags of the same meaning, or {READS_VLLM}",
            )

    def check_installed(self, where: str) -> None:
        if importlib.util.find_spec("sglang") is None:
            remedy = f"make install-sglang (CPU); on a GPU host pip install sglang sglang-router; or {READS_VLLM}"
            raise ConfigError("SGLang is not installed here", where=where, remedy=remedy)


KIND = SglangKind()  # type: ignore[abstract]
