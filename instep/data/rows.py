"""The rows of a prompt file (jsonl, also named .json, or parquet), each with file and line, and their checks.

This module imports neither torch nor transformers, so that files can be checked together with the arguments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from instep.data.graders import GRADERS, NEED_LABELS, grader_of, wrong_label
from instep.data.messages import Message, as_object, checked_message, short, with_arguments
from instep.errors import ConfigError, DataError
from instep.system.documents import parse_json

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d{0,18}):(?P<stop>-?\d{0,18})\]$")
PARQUET_ROWS = 256  # decoded at a time
ENDINGS = (".jsonl", ".json", ".parquet")
# A data set of the hub; see `named.py`.
NAMED = re.compile(
    r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<config>[\w.+-]+)(?=:))?"
    r"(?::(?P<split>[^@,]+))?",
    re.ASCII,
)
_IN_MEMORY = re.compile(r"prompts-[0-9a-f]{12}\.jsonl")  # the file of rows from a script


@dataclass(frozen=True)
class RowFormat:
    """The keys of a row; without `label_key`, rows need no label. Other columns become metadata.

    With `conversation` the prompt is a conversation to train on: messages with at least one assistant turn that is not
    masked. With `pair_keys` a row is a preference pair, and its label holds the two responses (see `check_pair`).
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    conversation: bool = False
    pair_keys: tuple[str, str] | None = None  # of the chosen and the rejected response
    grader: str | None = None
    asked: bool = False  # whether the model answers prompts unchanged

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys by which a row is read."""
        named = (self.input_key, self.label_key, self.metadata_key, self.tool_key, *(self.pair_keys or ()))
        return tuple(key for key in named if key is not None)


@dataclass
class Record:
    """A checked row.

    Attributes:
        prompt: as in the file (text, or messages), or rendered: a sample's `prompt`.
        messages: the prompt as messages; None for a text that is not rendered.
        label: for a preference pair {"chosen": ..., "rejected": ...}, both text or lists of messages, as the prompt.
        metadata: with other columns, and the tools.
        where: file and line, for errors.
    """

    prompt: str | list[Message]
    messages: list[Message] | None
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    where: str


class RawRow(NamedTuple):
    """A row that is not parsed yet.

    Attributes:
        number: of its line, from 1, or of the row of a parquet file, from 0.
        offset: the byte of a jsonl file where its line begins; None in a parquet file, which is stored in columns.
        read: returns the row as JSON. Raises: DataError if a row of a parquet file is not JSON.
    """

    number: int
    offset: int | None
    read: Callable[[], bytes]


@dataclass
class BadRows:
    """The unusable rows of a file: their number, and the errors of the first 1,000."""

    num: int = 0
    errors: list[DataError] = field(default_factory=list)

    def add(self, error: DataError) -> None:
        self.num += 1
        if self.num <= 1000:
            self.errors.append(error)


def split_files(prompt_data: str) -> list[str]:
    """The files of `a.jsonl,b.parquet@[0:100],openai/gsm8k:main:train`. A comma in a file's name separates nothing."""
    files: list[str] = []
    for part in prompt_data.split(","):
        last = files[-1].strip() if files else "]"
        if last.endswith((*ENDINGS, "]")) or (":" in last and NAMED.fullmatch(last)):
            files.append(part)
        else:
            files[-1] += f",{part}"
    return [file.strip() for file in files]


def parse_path(path_spec: str) -> tuple[Path, slice]:
    """Split `file@[start:stop]` into the file and a slice of its rows, with the meaning of Python's slices."""
    if "@[" not in path_spec:
        return Path(path_spec), slice(None)
    match = _SLICE.match(path_spec)
    if match is None or "-" in (match["start"], match["stop"]):
        what = f"cannot read the slice of {path_spec!r}"
        raise ConfigError(what, where=str(path_spec), remedy="write path@[start:stop], as in train.jsonl@[0:1000]")
    start, stop = (int(x) if x else None for x in (match["start"], match["stop"]))
    return Path(match["path"]), slice(start, stop)


def read_rows(
    path_spec: str, row_format: RowFormat, bad_rows: BadRows | None = None
) -> Iterator[tuple[RawRow, bytes, Record]]:
    """Yield the rows of a file in order: raw, as JSON, and checked. Only some of them are in memory at a time.

    With `bad_rows`, the errors of unusable rows go there and are not raised.

    Raises:
        ConfigError: a malformed slice or an unknown kind of file.
        DataError: file missing, unreadable or without rows; an unusable row (with file and line).
    """
    path, part = parse_path(path_spec)
    if path.suffix not in ENDINGS:
        what = f"data files end in .jsonl or .parquet, not {path.suffix or 'nothing'!r}"
        raise ConfigError(what, where=str(path), remedy="one JSON object per line in a .jsonl file")
    try:
        if not path.is_file():
            what = "this is a folder, not a data file" if path.is_dir() else "data file not found"
            raise DataError(what, where=str(path), remedy="check the path; relative paths start at the working folder")
        count = 0
        for raw in _parquet(path, part, row_format.columns) if path.suffix == ".parquet" else _jsonl(path, part):
            count += 1
            try:
                line = raw.read()
                row = parse_row(line, place(path, raw.number), row_format)
            except DataError as error:
                if bad_rows is None:
                    raise
                bad_rows.add(error)
                continue
            yield raw, line, row
    except OSError as error:
        raise unreadable(path, error) from error
    if not count:
        cause = "the data file has no rows" if part == slice(None) else "the slice holds no row of the data file"
        raise DataError(cause, where=path_spec, remedy="a data file needs at least one row")


def unreadable(path: Path, error: OSError) -> DataError:
    remedy = "change its permissions" if error.errno else "write the file again"  # errors of pyarrow have no number
    return DataError(f"cannot read the data file: {error.strerror or error}", where=str(path), remedy=remedy)


def place(path: Path, number: int) -> str:
    """Return file and line of a row, or its place in a script's data, for errors; `number` as in `RawRow`."""
    if _IN_MEMORY.fullmatch(path.name):
        return f"prompts[{number - 1}]"
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {number}"


def parse_row(line: bytes, where: str, row_format: RowFormat) -> Record:
    """Return the checked row of a JSON text. Raises: DataError if it is unusable."""
    check = check_row if row_format.pair_keys is None else check_pair
    return check(_parse_json(line, where), where, row_format)


def _jsonl(path: Path, part: slice) -> Iterator[RawRow]:
    start, stop = part.start or 0, part.stop
    with path.open("rb") as file:
        if start < 0 or (stop or 0) < 0:  # counted from the end
            start, stop, _ = part.indices(sum(1 for line in file if line.strip()))
            file.seek(0)
        offset = count = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                if stop is not None and count >= stop:
                    return
                if count >= start:
                    yield RawRow(number, offset, partial(bytes, line))
                count += 1
            offset += len(line)


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return parse_json(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        what = f"not UTF-8: {error.reason} at byte {error.start}"
        raise DataError(what, where=where, remedy="data files are UTF-8 text; convert the file") from error
    except ValueError as error:
        raise _bad(where, f"the row {error}") from error


def _parquet(path: Path, part: slice, columns: tuple[str, ...]) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow", where=str(path), remedy="pip install pyarrow") from error
    try:
        # A row group may be larger than the memory, so only some of its pages are read at a time.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            start, stop, _ = part.indices(file.metadata.num_rows)
            names = file.schema_arrow.names
            read = [f.name for f in file.schema_arrow if f.name in columns or "binary" not in str(f.type)]
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=read):
                for i in range(max(start - number, 0), min(stop - number, batch.num_rows)):
                    where = place(path, number + i)
                    yield RawRow(number + i, None, partial(_json_row, batch, i, names, columns, where))
                number += batch.num_rows
                if number >= stop:
                    return
    except pyarrow.ArrowException as error:
        raise DataError(f"not a parquet file: {error}", where=str(path), remedy="write the file again") from error


def _json_row(batch: Any, i: int, names: list[str], columns: tuple[str, ...], where: str) -> bytes:
    """Return row `i` of a batch as JSON. Columns of `names` that were not read, or that JSON cannot hold, are null."""
    row = dict.fromkeys(names, "null")
    for key in batch.schema.names:
        try:
            row[key] = json.dumps(_without_nulls(batch.column(key)[i].as_py()), ensure_ascii=False)
        except (ValueError, OverflowError, TypeError, KeyError) as error:  # bad UTF-8 or date; bytes, a date, ...
            if key in columns:
                raise _bad(where, f"{key!r} holds what JSON cannot: {error}") from error
    return ("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in row.items()) + "}").encode()


def _without_nulls(value: Any) -> Any:
    """Return a value of a parquet file without null fields: each struct has the fields of all, as templates see."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def check_row(row: Any, where: str, keys: RowFormat) -> Record:
    """Return the parts of one row. Raise a DataError with row and key if it is unusable."""
    bad = partial(_bad, where)
    _check_keys(row, {"--input-key": keys.input_key, "--label-key": keys.label_key}, bad)
    prompt = _check_text(row[keys.input_key], keys.input_key, bad)
    if keys.conversation:
        _check_conversation(prompt, bad)
    elif keys.asked and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        what = "the prompt ends in an assistant turn, which no template continues: the model would begin another"
        raise bad(what, "remove that turn, or give the prompt as text that ends where the model should continue")
    metadata = row.get(keys.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise bad(f"{keys.metadata_key!r} must be an object, not {short(metadata)}")
    tools = row.get(keys.tool_key)
    if isinstance(tools, str):  # parquet files often hold tool schemas as text
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise bad(f"{keys.tool_key!r} is text that {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise bad(f"{keys.tool_key!r} must be a list of objects, not {short(tools)}")
    label = None if keys.label_key is None else row[keys.label_key]
    more = {key: value for key, value in row.items() if key not in keys.columns and value is not None}
    more |= metadata or {}
    _check_label(label, more, keys, bad)
    messages = prompt if isinstance(prompt, list) else None
    return Record(prompt, messages, label, {**more, "tools": tools} if tools else more, tools or None, where)


def check_pair(row: Any, where: str, keys: RowFormat) -> Record:
    """Return the parts of a preference pair: prompt, chosen and rejected, all text or all lists of messages.

    In a row without a prompt, the common beginning of the two conversations is the prompt. Raises: DataError.
    """
    assert keys.pair_keys is not None
    bad = partial(_bad, where)
    _check_keys(row, dict(zip(("--chosen-key", "--rejected-key"), keys.pair_keys, strict=True)), bad)
    chosen, rejected = (_check_text(row[key], key, bad) for key in keys.pair_keys)
    if chosen == rejected:
        raise bad("both responses are equal: there is nothing to prefer")
    if row.get(keys.input_key) is None and isinstance(chosen, list) and isinstance(rejected, list):
        num = min(len(chosen), len(rejected))
        same = next((i for i in range(num) if chosen[i] != rejected[i]), num)
        if not same:
            what = f"the row has no {keys.input_key!r}, and the conversations begin with different messages"
            raise bad(what, f"name the prompt's column with --input-key: the row has {_names(row)}")
        row, chosen, rejected = {**row, keys.input_key: chosen[:same]}, chosen[same:], rejected[same:]
    row = {key: value for key, value in row.items() if key not in keys.pair_keys}
    out = check_row(row, where, replace(keys, label_key=None, pair_keys=None))
    for key, response in zip(keys.pair_keys, (chosen, rejected), strict=True):
        if isinstance(response, str) != isinstance(out.prompt, str):
            both = ((keys.input_key, out.prompt), (key, response))
            kinds = [f"{k!r} is {'text' if isinstance(v, str) else 'a list of messages'}" for k, v in both]
            raise bad(", ".join(kinds), "make both text, or both lists of messages")
        if isinstance(response, list) and not any(
            _is_trained(m) and (m["content"] or "tool_calls" in m) for m in response
        ):
            raise bad(f"{key!r} has no assistant turn with content to train on")
    out.label = {"chosen": chosen, "rejected": rejected}
    return out


def _bad(where: str, what: str, remedy: str = "fix the row, or skip such rows with --skip-bad-rows") -> DataError:
    return DataError(what, where=where, remedy=remedy)


def _check_keys(row: Any, keys: dict[str, str | None], bad: Callable[..., DataError]) -> None:
    """Raise a DataError unless the row is an object with a value for each of `keys`, which maps keys to flags."""
    if not isinstance(row, dict):
        raise bad(f"a row must be a JSON object, not {type(row).__name__}")
    for flag, key in keys.items():
        if key is not None and row.get(key) is None:
            what = f"the row has no {key!r}" if key not in row else f"{key!r} of the row is null"
            raise bad(what, f"fix the row, or name another column with {flag}: it has {_names(row)}")


def _check_text(value: Any, key: str, bad: Callable[..., DataError]) -> str | list[Message]:
    """Return the value if it is text or a list of messages, and not empty; otherwise raise a DataError."""
    if value == "":
        raise bad(f"{key!r} is empty")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return [_check_message(message, i, bad) for i, message in enumerate(value)]
    raise bad(f"{key!r} must be text or a list of messages, not {short(value)}")


def _is_trained(message: Message) -> bool:
    return bool(message["role"] == "assistant" and message.get("step_loss_mask", 1))


def _check_label(label: Any, metadata: dict[str, Any], keys: RowFormat, bad: Callable[..., DataError]) -> None:
    if isinstance(label, float) and not math.isfinite(label):
        raise bad(f"{keys.label_key!r} of the row is {label}, which JSON does not allow")
    if keys.grader is None:
        return
    rule = str(metadata.get("rm_type") or keys.grader)
    grader = grader_of(rule)
    if rule and grader not in GRADERS:
        raise bad(f"'rm_type' in {keys.metadata_key!r} is no built-in reward: {short(rule)}")
    if grader == "gpqa" and not isinstance(choices := metadata.get("choices") or [], (list, dict)):
        raise bad(f"'choices' in {keys.metadata_key!r} is neither a list nor an object: {short(choices)}")
    if keys.label_key is None and grader in NEED_LABELS:
        raise bad(f"the reward {rule} needs a label", "name the column of the labels with --label-key")
    if keys.label_key is not None and (wrong := wrong_label(rule, label, metadata)):
        raise bad(f"{keys.label_key!r} of the row {wrong}: {short(label)} (reward {rule})")


def _check_message(message: Any, i: int, bad: Callable[[str], DataError]) -> Message:
    checked = checked_message(message, i, bad)
    if not isinstance(checked.get("role"), str) or not checked["role"]:
        raise bad(f"message {i} has no role: {short(checked)}")
    if message.get("content") is None and not checked.get("tool_calls"):
        raise bad(f"message {i} ({checked['role']}) has no content")
    if checked.get("step_loss_mask", 1) not in (0, 1):
        raise bad(f"step_loss_mask of message {i} must be 0 or 1, not {short(checked['step_loss_mask'])}")
    with_arguments(checked, (arguments := list[Any]()).append)
    if wrong := [given for given in arguments if isinstance(as_object(given), str)]:
        raise bad(f"the arguments of a tool call of message {i} are text that is no JSON object: {short(wrong[0])}")
    return checked


def _check_conversation(prompt: str | list[Message], bad: Callable[[str], DataError]) -> None:
    if isinstance(prompt, str):
        raise bad(f"the prompt is text, not a conversation: {short(prompt)}")
    if not any(_is_trained(m) for m in prompt):
        raise bad("the conversation has no assistant turn to train on (none, or all have step_loss_mask 0)")


def _names(row: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "none"
