"""docs/api.md, made from signatures and docstrings: `python scripts/docs/api.py > docs/api.md`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

# What scripts and hooks use: the sections of the page.
NAMES = {
    "Runs": ["instep.train", "instep.Run", "instep.controller.round.Step"],
    "Samples": ["instep.types.Sample", "instep.types.Sample.append_response_tokens"],
    "Generate functions": [
        "instep.rollout.vllm_rollout.generate",
        "instep.rollout.vllm_rollout.generate_rollout",
        "instep.rollout.tokens.next_turn",
        "instep.rollout.client.complete",
        "instep.rollout.sandbox.run_python",
    ],
    "HTTP with the run's key": ["instep.rollout.http.post", "instep.rollout.http.get", "instep.rollout.http.api_key"],
}
ABOUT = """# Python API

Made by `python scripts/docs/api.py > docs/api.md`; do not edit. How to use it: [python.md](python.md),
[agents.md](agents.md), [hooks.md](hooks.md).
"""


def markdown() -> str:
    """docs/api.md."""
    lines = [ABOUT]
    for title, names in NAMES.items():
        lines += [f"## {title}", ""]
        for name in names:
            found = named(name)
            lines += [
                f"### `{name}`",
                "",
                "```python",
                *_wrapped(signature(found).replace("'", '"')),
                "```",
                "",
                *prose(found),
            ]
    return "\n".join(lines).rstrip() + "\n"


def named(path: str) -> Any:
    """The object with a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:  # a method
        return getattr(named(module), name)


def signature(found: Any) -> str:
    """A function's or a class's first line; of a dataclass its fields."""
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    if isinstance(node, ast.ClassDef):
        makers = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
        if not makers:
            return "\n".join([f"class {node.name}:", *(f"    {field}" for field in fields if field[0] != "_")])
        return f"class {node.name}({ast.unparse(makers[0].args).removeprefix('self, ')})"
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix}def {node.name}({ast.unparse(node.args)}){returns}"


def prose(found: Any) -> Iterator[str]:
    """A docstring as Markdown: its sections become lists."""
    for part in (inspect.getdoc(found) or "").split("\n\n"):
        head, _, rest = part.partition("\n")
        if not re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", head):
            yield from (part, "")
            continue
        entries = re.split(r"\n(?! )", textwrap.dedent(rest))
        yield from (f"**{head[:-1]}**", "", *(f"- {_entry(' '.join(entry.split()))}" for entry in entries), "")


def _wrapped(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, 96, subsequent_indent="    ")]


def _entry(text: str) -> str:
    return re.sub(r"^([\w, ]+):", lambda match: f"`{match[1]}`:", text)


if __name__ == "__main__":
    print(markdown(), end="")
