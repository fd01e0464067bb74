"""Chat templates from a checkpoint, rendered within bounds of time and memory.

The sandbox of transformers (Jinja's) keeps a template from code and files, but not from endless computation. Here an
operation is refused before it makes a text or list of more than LIMIT characters. This check costs less than a
microsecond. A thread ends a rendering that takes too long or makes the process grow too much.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from types import BuiltinMethodType
from typing import Any

import jinja2
import psutil
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from instep.data.messages import Message, as_object, checked_message, clock, with_arguments
from instep.errors import CheckpointError, DataError
from instep.system.importing import first_import

LIMIT = 1 << 26  # characters of a text; an entry of a list counts as ENTRY
ENTRY = 128
BITS = 1 << 16  # of an integer
SECONDS = 30.0  # of a rendering, which normally takes less than a millisecond
GROWTH_BYTES = 4 << 30  # of the process, during a rendering that lasts longer than two checks
LOOK_SECONDS = 0.1
LONG, GREW = "took more than {:g} s", "let this process grow by more than {:.0f} GB"
_PRODUCTS = frozenset(("replace", "indent", "join", "translate", "expandtabs"))  # their result may be a product
_MARKS = "\ue004\ue005"  # private use: in no conversation
# Filters and methods of texts and numbers whose result may be much larger than their input.
_GROWING = frozenset(
    "batch center expandtabs format format_map indent instep_joined join ljust replace rjust round slice to_bytes "
    "tojson translate zfill".split()
)


class TemplateTooLarge(jinja2.TemplateError):
    """A template computes too much."""


class _Stop(Exception):
    """Raised in the thread of a rendering by the thread that watches it."""


def apply_template(tokenizer: Any, messages: Sequence[Any], where: str = "", /, **given: Any) -> Any:
    """Call `tokenizer.apply_chat_template` within bounds, with messages in any form of OpenAI's API.

    Raises:
        CheckpointError: the template is not valid Jinja.
        DataError: a content is not text.
        TemplateTooLarge: it takes too much time or memory; the text names the template.
    """
    messages = text_messages(tokenizer, messages, where)
    try:
        return _bounded(tokenizer, [with_arguments(m, as_object) for m in messages], given)
    except TypeError:  # some templates, such as DeepSeek's of 2024, join arguments with text
        as_text = [
            with_arguments(m, lambda x: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False))
            for m in messages
        ]
        return _bounded(tokenizer, as_text, given)


def _bounded(tokenizer: Any, messages: list[Message], given: Mapping[str, Any]) -> Any:
    _bound_environments()
    place = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
    name = f"the chat template of {place}"
    watched = _Watched()
    try:
        with watched:
            return tokenizer.apply_chat_template(messages, **given)
    except (_Stop, MemoryError) as error:
        raise TemplateTooLarge(f"{name} {watched.why or 'has used up the memory'}") from error
    except TemplateTooLarge as error:
        raise TemplateTooLarge(f"{name} {error}") from error
    except jinja2.TemplateSyntaxError as error:
        what = f"{name} is wrong in line {error.lineno}: {error.message}"
        remedy = "fix the one of --chat-template, or its chat_template.jinja or tokenizer_config.json"
        raise CheckpointError(what, where=place, remedy=remedy) from error


def text_messages(tokenizer: Any, messages: Sequence[Any], where: str = "") -> list[Message]:
    """Return the messages with all content as text, without keys that are null.

    Raises:
        DataError: a content is not text.
    """
    bad = functools.partial(DataError, where=where, remedy="give text or text parts")
    checked = [checked_message(message, i, bad) for i, message in enumerate(messages)]
    for message in checked:
        if not isinstance(message["content"], str):
            texts = [part if isinstance(part, str) else part["text"] for part in message["content"]]
            message["content"] = (_between_parts(tokenizer) if texts[1:] else "").join(texts)
    return checked


def _between_parts(tokenizer: Any) -> str:
    """Return the template's blanks between two text parts. If it takes only text, return a line break, as vLLM does."""
    parts = [{"type": "text", "text": mark} for mark in _MARKS]
    try:
        text = _bounded(tokenizer, [{"role": "user", "content": parts}], {"tokenize": False})
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return "\n"
    found = re.search(r"(\s*)".join(_MARKS), text)
    return found[1] if found else "\n"


# ---- time, and the memory of all operations together -----------------------------------------------------------------

_lock = threading.Lock()
_under_way: dict[int, _Watched] = {}  # thread -> its rendering
_begun = threading.Event()


class _Watched:
    why = ""

    def __enter__(self) -> None:
        self.began, self.rss = time.monotonic(), 0
        _under_way[threading.get_ident()] = self
        if not _begun.is_set():
            _begun.set()
            _watcher()

    def __exit__(self, *exc: object) -> None:
        del _under_way[threading.get_ident()]
        if self.why:
            with _lock:  # an exception that is not raised yet is withdrawn
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)

    def look(self, thread: int) -> None:
        rss = psutil.Process().memory_info().rss
        self.rss = self.rss or rss
        with _lock:
            if time.monotonic() - self.began > SECONDS:
                why = LONG.format(SECONDS)
            elif rss - self.rss > GROWTH_BYTES:
                why = GREW.format(GROWTH_BYTES / 1e9)
            else:
                return
            if _under_way.get(thread) is self and not self.why:
                self.why = why
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))


@functools.cache
def _watcher() -> threading.Thread:
    def watch() -> None:
        while _begun.wait():
            time.sleep(LOOK_SECONDS)
            _begun.clear()
            for thread, one in list(_under_way.items()):
                _begun.set()  # look again
                if time.monotonic() - one.began > LOOK_SECONDS:
                    one.look(thread)

    thread = threading.Thread(target=watch, name="instep-template", daemon=True)
    thread.start()
    return thread


# ---- single operations -----------------------------------------------------------------------------------------------


@functools.cache
def _bound_environments() -> None:
    """Let transformers compile templates for a `_Bounded` environment."""
    with first_import("transformers.utils.chat_template_utils"):
        from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = _Bounded  # type: ignore[attr-defined]


def _refuse(size: int) -> None:
    if size > LIMIT:
        raise TemplateTooLarge(f"makes a text or list of more than {LIMIT >> 20} million characters")


def _size(value: Any) -> int:
    """Return about the number of characters of a value as text. The walk through a container ends at LIMIT."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return ENTRY
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, tuple, dict)):
            total += ENTRY * len(one)
            stack += [*one, *one.values()] if isinstance(one, dict) else one
        else:
            total += len(one) if isinstance(one, (str, bytes)) else ENTRY
        if total > LIMIT:
            break
    return total


def _whole(values: Iterable[Any]) -> int:
    """Return the largest absolute integer among the values and the entries of tuples; at least 1."""
    found = 1
    for value in values:
        if isinstance(value, tuple):
            found = max(found, _whole(value))
        elif isinstance(value, int):
            found = max(found, abs(value))
    return found


def _longest(values: Iterable[Any]) -> int:
    """Return the length of the longest text among the values and their entries."""
    return max(
        (len(v) if isinstance(v, str) else _longest(v) if isinstance(v, (list, tuple)) else 0 for v in values),
        default=0,
    )


def _formatted(form: Any, values: Any) -> int:
    """Return the size of a text formatted by `form`: of its fields, and of the widths that it names."""
    if not isinstance(form, (str, bytes)):
        return 0
    text = form if isinstance(form, str) else form.decode(errors="replace")
    widths = sum(int(width) for width in re.findall(r"\d{1,18}", text))
    return len(text) + widths + (text.count("%") + text.count("{")) * max(_size(values), _whole([values]))


def _check(name: str, owner: Any, values: list[Any]) -> None:
    """Refuse a function of Python or Jinja, on `owner`, whose result would be too large."""
    if name in ("batch", "slice"):
        return _refuse(_whole(values))
    if name in ("format", "format_map"):
        return _refuse(_formatted(owner, tuple(values)))
    sizes = [_size(owner), *map(_size, values)]
    if name in _PRODUCTS:
        size = _whole(values)
        for one in sizes:
            size *= max(1, one)
        old = max(1, sizes[1]) if name == "replace" and sizes[1:] else 1
        return _refuse(size // (old * old))
    if name == "tojson":  # each entry gets an indent and separators
        return _refuse(max(_whole(values), _longest(values)) * sizes[0])
    _refuse(max(sum(sizes), _whole(values)))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `name` with a check of its result's size before it runs."""
    skipped = int(getattr(function, "jinja_pass_arg", None) is not None)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value = args[skipped]
        if isinstance(value, Iterator):
            args = (*args[:skipped], value := list(value), *args[skipped + 1 :])
        _check(name, value, [*args[skipped + 1 :], *kwargs.values()])
        return function(*args, **kwargs)

    return checked


class _Checks(NodeTransformer):
    """Turns `a ~ b` into a filter, and puts a check around each list, tuple or dict that is not constant.

    So no container exceeds its bound, counted with the contents of its parts. Then comparing, hashing or printing one
    always ends.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's names
        self.generic_visit(node)
        first, *others = node.nodes
        return nodes.Filter(first, "instep_joined", others, [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(i, nodes.Const) for i in node.iter_child_nodes()):
            return node
        return nodes.Filter(node, "instep_looked_at", [], [], None, None, lineno=node.lineno)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


def _joined(*values: Any) -> str:
    return "".join(map(str, values))


def _looked_at(value: Any) -> Any:
    """Return the value if it is not too large."""
    if isinstance(value, (list, tuple, dict)):
        _refuse(_size(value))
    return value


def _strftime_of_run(form: str) -> str:
    return datetime.fromisoformat(clock().started or datetime.now().isoformat()).strftime(form)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.globals.pop("lipsum")

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        self.globals["strftime_now"] = _strftime_of_run
        plain = {**self.filters, "instep_joined": _joined, "instep_looked_at": _looked_at}
        for name in ("urlize", "wordwrap", "pprint"):  # their time is not a product of sizes
            plain.pop(name, None)
        self.filters = {name: _checked(name, f) if name in _GROWING else f for name, f in plain.items()}
        return super().from_string(*args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checks().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator in ("*", "**"):
                bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
                if bits > BITS:
                    raise TemplateTooLarge(f"makes an integer of more than {BITS} bits")
        elif operator == "+":
            if type(left) is not str or type(right) is not str or len(left) + len(right) > LIMIT:
                _refuse(_size(left) + _size(right))
        elif operator == "*":
            _refuse(max(_size(left) * _whole([right]), _size(right) * _whole([left])))
        elif operator == "%":
            _refuse(_formatted(left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, (str, bytes, int)):
            if method.__name__ in _GROWING:
                _check(method.__name__, method.__self__, [*args, *kwargs.values()])
        return _looked_at(super().call(__context, __obj, *args, **kwargs))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        """Return the text of a template, of a macro or of a block."""
        out: list[str] = []
        size, left = 0, iter(parts)
        while some := list(islice(left, 64)):
            size += sum(map(len, some))
            _refuse(size)
            out += some
        return "".join(out)
