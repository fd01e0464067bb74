"""Loading of users' functions, which flags name by dotted path."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from instep.errors import ConfigError


@functools.cache
def load_function(dotted_path: str) -> Callable[..., Any]:
    """The function or class `package.module.name`, imported once per process.

    Raises:
        ConfigError: no such module, a module that fails to import, no such name, or something that cannot be called.
    """
    module_name, _, name = dotted_path.rpartition(".")
    if not module_name or "/" in dotted_path or ":" in dotted_path:
        raise ConfigError(
            f"{dotted_path!r} is no dotted path", where="hook", remedy="write package.module.function, without .py"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise ConfigError(
                f"module {module_name!r} imports {missing!r}, which is not installed",
                where=f"hook {dotted_path}",
                remedy=f"install {missing!r} or mend the import",
            ) from error
        raise ConfigError(
            f"module {missing!r} not found",
            where=f"hook {dotted_path}",
            remedy="put its folder on PYTHONPATH, or mend the path",
        ) from error
    except Exception as error:  # the border to a user's code: whatever it raises is named here
        raise ConfigError(
            f"importing {module_name!r} raised {type(error).__name__}: {error}",
            where=f"hook {dotted_path}, {raised_at(error)}",
            remedy="mend the module",
        ) from error
    found = getattr(module, name, None)
    if found is None:
        names = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise ConfigError(
            f"module {module_name!r} has no {name!r}",
            where=f"hook {dotted_path}",
            remedy=f"it has {', '.join(names[:20]) or 'nothing to call'}",
        )
    if not callable(found):
        raise ConfigError(
            f"{dotted_path!r} is a {type(found).__name__}, not a function",
            where=f"hook {dotted_path}",
            remedy="name a function or a class",
        )
    return found


def raised_at(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """`file:line in name`: the innermost frame of `error`, if possible in the file of `function`."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    source = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    own = [f for f in frames if f.filename == source] if source else []
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"
