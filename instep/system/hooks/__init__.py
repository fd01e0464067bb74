"""Hooks: users' functions that flags name by dotted path. Load them, call them, and report which one failed where."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from instep.errors import ConfigError, InstepError, RolloutError
from instep.system.hooks.aliases import install_aliases, is_aliased
from instep.system.hooks.neighbours import is_own
from instep.system.hooks.user_code import described, functions_of_run, is_from_outside, is_interrupt, ours, said
from instep.system.run_context import cached_per_run

# The errors of aiohttp, httpx, requests, urllib and openai for status 401.
_UNAUTHORIZED = re.compile(r"\b401\b.{0,20}(?i:unauthorized)|\b401, message|Error code: 401\b|Error 401:")

_SEND_THE_KEY = (
    "engines and routers of the run need its key: use instep.rollout.http.post, or send the header 'Authorization: "
    "Bearer KEY' with instep.rollout.http.api_key(url) as KEY; with --no-api-key no key is needed (docs/security.md)"
)


@dataclass(frozen=True)
class Hook:
    """A user's function or class, and the flag that names it.

    Attributes:
        path: the dotted path; empty for a function without one, which is known only by its flag.
    """

    flag: str
    path: str

    @property
    def function(self) -> Callable[..., Any]:
        return load_function(self.path)

    def __str__(self) -> str:
        return f"{self.flag} {self.path}".strip()

    def call(self, *args: Any, where: str = "", **kwargs: Any) -> Any:
        """Call a function that is not async.

        Args:
            where: what it is called for, such as a sample. The error shows it.

        Raises:
            RolloutError: the function raised an error, or is async.
        """
        with self.guard(where):
            out = self.function(*args, **kwargs)
            if inspect.iscoroutine(out):
                out.close()
                raise self.wrong(out, "the result itself: async functions are not supported here", where)
        return out

    async def acall(self, *args: Any, where: str = "", **kwargs: Any) -> Any:
        """Call a sync or async function. Raises: RolloutError, as in `call`."""
        with self.guard(where):
            out = self.function(*args, **kwargs)
            return await out if inspect.isawaitable(out) else out

    @contextmanager
    def guard(self, where: str = "") -> Iterator[None]:
        """Turn errors of the function in the block into a RolloutError. A named error without a place gets one.

        instep's own functions are not guarded: their errors are bugs of instep, not of the user.
        """
        try:
            yield
        except InstepError as error:
            error.where = error.where or self.place(where)
            raise
        except BaseException as error:  # the boundary to the user's code, also for its sys.exit()
            if is_own(self.path) or is_from_outside(error):
                raise
            function = self.function if self.path else None
            at, remedy = raised_at(error, function), signature_for(error, function, self.flag)
            remedy = remedy or "correct that line, or catch the error there; `instep train --help` shows its arguments"
            if _UNAUTHORIZED.search(said(error, 1 << 16)):
                remedy = _SEND_THE_KEY
            raise RolloutError(f"{self.path} raised {said(error)}", where=self._at(at, where), remedy=remedy) from error

    def wrong(self, got: Any, expected: str, where: str = "") -> RolloutError:
        """Return the error for a function that returned `got`. `expected` says what it must return."""
        what = f"{self.path or 'the function'} returned {described(got)}"
        return RolloutError(what, where=self.place(where), remedy=f"return {expected}")

    @contextmanager
    def reading(self, got: Any, expected: str, where: str = "") -> Iterator[None]:
        """Turn an error of the block, which reads the function's result, into `wrong`."""
        try:
            yield
        except Exception as error:  # the boundary to the methods of a user's object
            raise self.wrong(got, expected, where) from error

    def place(self, where: str = "") -> str:
        """Return flag, path, and file and line of the definition, for errors."""
        return self._at(defined_at(self.path) if self.path else "", where)

    def _at(self, at: str, where: str) -> str:
        return "; ".join(part for part in (f"{self}{at and f', {at}'}", where) if part)


@cached_per_run
def load_function(dotted_path: str) -> Callable[..., Any]:
    """Return the function or class `package.module.name`. It is imported once per process, and looked up once per run.

    Raises:
        ConfigError: the module does not exist or cannot be imported, or the name does not exist or is not callable.
    """
    if (given := functions_of_run().get(dotted_path)) is not None:
        return given
    module_name, _, name = dotted_path.rpartition(".")
    where = f"hook {dotted_path}"
    if not module_name or "/" in dotted_path or ":" in dotted_path:
        remedy = "write package.module.function, without .py"
        raise ConfigError(f"{dotted_path!r} is not a dotted path", where="hook", remedy=remedy)
    install_aliases()
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)
    except BaseException as error:  # the boundary to the user's code: report every error
        if is_interrupt(error):
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not isinstance(missing, str):  # also a ModuleNotFoundError that a module raises itself
            what, where = f"importing {module_name!r} raised {said(error)}", f"{where}, {raised_at(error)}"
            remedy = f"correct that line; `python -c 'import {module_name}'` shows the whole traceback"
        elif f"{module_name}.".startswith(f"{missing}."):
            what = f"module {missing!r} not found"
            remedy = "add its folder to PYTHONPATH, or start instep there; the path is package.module.function"
        else:
            what = f"module {module_name!r} imports {missing!r}, which is not installed"
            remedy = f"install {missing!r}, or remove the import"
            if is_aliased(missing.partition(".")[0]) and "." in missing:
                remedy += "; docs/migration.md, 'Hooks', lists its supported modules"
        raise ConfigError(what, where=where, remedy=remedy) from error
    if callable(found):
        return found
    what, remedy = f"{dotted_path!r} is a {type(found).__name__}, not a function", "name a function or a class"
    if found is None:
        names = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        what = f"module {module_name!r} has no {name!r}"
        remedy = f"it has {', '.join(names[:20]) or 'no functions'}"
    raise ConfigError(what, where=where, remedy=remedy)


def raised_at(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return `file:line in name` of the innermost frame of `error`, if possible in the file of `function`.

    If the call does not fit the function's parameters, return the place of its definition.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and isinstance(error.filename, str):
        return f"{error.filename}:{error.lineno}"
    source = _source(function)
    own = [f for f in frames if (f.filename == source if source else not f.filename.startswith(ours()))]
    last = (own or frames)[-1]
    if _does_not_fit(error, function):
        code = inspect.unwrap(function).__code__  # type: ignore[union-attr, arg-type]
        return f"{source}:{code.co_firstlineno}, the definition of {code.co_name}"
    return f"{last.filename}:{last.lineno} in {last.name}"


def signature_for(error: BaseException, function: Callable[..., Any] | None, flag: str) -> str:
    """Return how the function of a flag is called, if it does not take these arguments; else an empty text."""
    from instep.arguments.all_flags import own_flags  # here, because it imports this module

    known = own_flags().get(flag)
    says = known is not None and "f(" in known.help
    return f"it is called as {known.help}" if known and says and _does_not_fit(error, function) else ""


def _does_not_fit(error: BaseException, function: Callable[..., Any] | None) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    source = _source(function)
    return bool(source) and isinstance(error, TypeError) and source not in files and files[-1].startswith(ours())


def _source(function: Callable[..., Any] | None) -> str | None:
    return inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None


@cached_per_run
def defined_at(dotted_path: str) -> str:
    """Return `file:line` of the definition of a function or class; empty if Python does not know it."""
    try:
        target = inspect.unwrap(load_function(dotted_path))
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):  # made in C, or no source
        return ""
