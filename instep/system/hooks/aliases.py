"""instep's equivalents of other projects' modules, which users' functions import or flags name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from instep.system.hooks.neighbours import added


@cache
def _theirs() -> dict[str, tuple[str, str]]:
    """Return, by name of another project's module, instep's module and the names that it provides."""
    return {name: here for modules in added("modules") for name, here in modules.items()}


def instep_hook(path: str) -> str:
    """Return instep's equivalent of another project's function at this dotted path, or an empty string."""
    module, _, name = path.rpartition(".")
    ours, names = _theirs().get(module, ("", ""))
    return f"{ours}.{name}" if name in names.split() else ""


class _Aliases(MetaPathFinder, Loader):
    """Importer for modules that are not installed. They contain instep's functions under the same names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        known = any(f"{module}.".startswith(f"{name}.") for module in _theirs())
        ours = known and not path  # a real package has a path
        return ModuleSpec(name, self, is_package=True) if ours else None

    def exec_module(self, module: ModuleType) -> None:
        ours, names = _theirs().get(module.__name__, ("", ""))
        for name in names.split():
            setattr(module, name, getattr(importlib.import_module(ours), name))


_ALIASES = _Aliases()


def install_aliases() -> None:
    """Allow users' files to import other projects' modules."""
    if _ALIASES not in sys.meta_path:
        sys.meta_path.append(_ALIASES)


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.loader is not _ALIASES


def is_aliased(package: str) -> bool:
    """Return whether a package belongs to a project with such modules, or to its plugins."""
    return package.removesuffix("_plugins") in {name.partition(".")[0] for name in _theirs()}
