"""Flags in a YAML file: `--config FILE` reads one, `--dump-config FILE` writes one.

The file maps names of flags without their dashes to values, as they would be typed: a list for several values, true or
false for a switch, a mapping for NAME FILE pairs and for JSON. Flags of the command line replace those of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.arguments.all_flags import find
from instep.arguments.extra import find_on_path
from instep.arguments.flag import Flag, path
from instep.arguments.parser import FromFile, Value, adds, for_sglang, is_flag, opposite
from instep.errors import ConfigError, writing
from instep.system.documents import read_text
from instep.system.private import without_credentials

if TYPE_CHECKING:
    from yaml import Node

CONFIG, DUMP = "--config", "--dump-config"
NULL = "tag:yaml.org,2002:null"


def expanded(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, followed by the flags of the file that `--config` names.

    Raises:
        ConfigError: the file is no such mapping; the error names the line.
    """
    out, file = [], None
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not is_flag(word) or isinstance(word, FromFile) or name.replace("_", "-") != CONFIG:
            out.append(word)
            continue
        value = value if equals else next(rest, "")
        if file is not None or not value or is_flag(value):
            raise ConfigError("takes one file", where=CONFIG, remedy=f"write {CONFIG} FILE, once")
        try:
            file = path(value)
        except ValueError as error:
            raise ConfigError(str(error), where=CONFIG, remedy="name a YAML file") from None
        out += [FromFile(CONFIG), Value(file)]
    if file is None:
        return out
    read = list(_read(file))
    sglang = for_sglang([*chain.from_iterable(read), *out])
    given = set[str]().union(*(_keys(word, sglang) for word in out if is_flag(word)))
    return [*out, *chain.from_iterable(words for words in read if not _keys(words[0], sglang) & given)]


def typed(word: str, flag: Flag | None, value: Any, convert: Callable[[Any], str] = str) -> list[str]:
    """Return a flag and its value as words: a list or a mapping is several values, where the flag takes several."""
    several = flag is not None and (flag.nargs or flag.append)
    if isinstance(value, Mapping) and several:
        value = list(chain.from_iterable(value.items()))
    values = [Value(convert(part)) for part in (value if isinstance(value, list) else [value])]
    return [part for one in values for part in (word, one)] if flag and flag.append else [word, *values]


def dump(file: str, command: str, uses: Sequence[tuple[str, Flag | None, Sequence[str]]]) -> None:
    """Write the flags of a command line to a file that `--config` reads. Secrets are left out.

    Args:
        uses: each use of a flag: its name, its record and its words.

    Raises:
        OutputError: the file cannot be written.
    """
    import yaml

    class Typed(yaml.SafeDumper):
        yaml_implicit_resolvers: dict[str, Any] = {  # quotes only for text that looks like null
            first: [one for one in resolvers if one[0] == NULL]
            for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
        }

    def text_of(dumper: yaml.SafeDumper, value: str) -> Node:
        style = '"' if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)

    Typed.add_representer(str, text_of)
    lines = [f"# instep {command} {CONFIG} {file}"]
    found: dict[str, tuple[str, list[str]]] = {}
    for typed_name, flag, words in uses:
        key, name = (typed_name, typed_name) if flag is None else (flag.attribute, flag.name)
        before = found.pop(key, ("", []))[1] if flag is not None and adds(flag) else []
        found.pop(key, None)
        if flag is not None and flag.secret:
            lines.append(f"# {name} is a secret: give it on the command line")
        elif name not in (CONFIG, DUMP):
            found[key] = name.lstrip("-"), [*before, *map(str, words or ["true"])]
    values = dict[str, str | list[str]]()
    for name, parts in found.values():
        if any(without_credentials(part) != part for part in parts):
            lines.append(f"# --{name} holds a secret: give it on the command line")
        else:
            values[name] = parts[0] if len(parts) == 1 else parts
    text = yaml.dump(values, Dumper=Typed, sort_keys=False, width=10**6, default_flow_style=None, allow_unicode=True)
    with writing(Path(file), DUMP):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("\n".join([*lines, text if values else ""]), encoding="utf-8")


def _keys(word: str, sglang: bool) -> set[str]:
    """Return what a flag of the command line replaces in the file: the flag, by any of its names, and its opposite."""
    name = word.partition("=")[0]
    if (flag := find(name, sglang=sglang)) is None:
        return {name.replace("_", "-")}
    other = opposite(flag, sglang) if flag.is_switch else None
    return {flag.attribute, *([other.attribute] if other else [])}


def _read(file: str) -> Iterator[list[str]]:
    """Yield the words of each flag in the file."""
    import yaml

    where = f"{CONFIG} {file}"
    try:
        root = yaml.compose(read_text(Path(file)), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"is not YAML: {error.problem}", where=where + line, remedy="correct that line") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot be read: {why}", where=where, remedy="give a readable YAML file") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        remedy = "write one flag a line, without dashes: `rollout-batch-size: 32`"
        raise ConfigError("is not a mapping of flags", where=f"{where}, line {root.start_mark.line + 1}", remedy=remedy)
    seen: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        word = FromFile("--" + str(key.value).replace("_", "-"), f"{file}, line {line}")
        here, name = f"{where}, line {line}", key.value
        if word in (CONFIG, DUMP):
            raise ConfigError(f"'{name}' cannot stand in a file", where=here, remedy="give it on the command line")
        if word in seen:
            raise ConfigError(f"'{name}' stands in line {seen[word]}, too", where=here, remedy="remove one of them")
        seen[word] = line
        flag = find(word) or find_on_path(word)
        plain = _plain(value, flag, name, here)
        if isinstance(plain, list) and flag is not None and not (flag.nargs or flag.append or flag.together):
            raise ConfigError(f"'{name}' takes one value, not a list", where=here, remedy="write the value alone")
        yield typed(word, flag, plain)


def _plain(node: Node, flag: Flag | None, name: str, where: str) -> Any:
    """Return a value: text as it stands, a list of texts, or a mapping (of a flag of one value: as JSON)."""
    import yaml

    several = flag is not None and (flag.nargs or flag.append)
    if isinstance(node, yaml.MappingNode) and not several:
        try:
            return json.dumps(_json(node))
        except (TypeError, RecursionError) as error:
            raise ConfigError(f"is not JSON: {error}", where=where, remedy="write it in quotes") from None
    is_mapping, is_list = isinstance(node, yaml.MappingNode), isinstance(node, yaml.SequenceNode)
    parts = list(chain.from_iterable(node.value)) if is_mapping else node.value if is_list else [node]
    if not all(isinstance(part, yaml.ScalarNode) for part in parts):
        raise ConfigError("a list holds text and numbers only", where=where, remedy="quote JSON: '{\"key\": 1}'")
    if any(part.tag == NULL for part in parts):
        raise ConfigError(f"'{name}' has no value", where=where, remedy="remove the line, or quote what is text")
    texts = [part.value for part in parts]
    return texts if is_mapping or is_list else texts[0]


def _json(node: Node) -> Any:
    """Return a node as JSON reads it: `1e-6` is a number, `no` and what is quoted are texts. Null is YAML's."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        if node.tag == NULL:
            return None
        try:
            return node.value if node.style else json.loads(node.value)
        except ValueError:
            return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_json(part) for part in node.value]
    return {key.value: _json(value) for key, value in node.value}
