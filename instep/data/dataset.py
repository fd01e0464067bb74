"""Data sets of prompts from jsonl or parquet files: checked, rendered, limited in length. No torch is imported."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.data.rows import Message, Row, RowFormat, read_rows
from instep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FORMAT = RowFormat()
logger = logging.getLogger(__name__)
NUM_ROWS_CHECKED = 100_000  # check_file leaves further rows to load_dataset
TOKENIZE_AT_ONCE = 1024
SHORT = 4  # a text is within a limit of this many times as many tokens as it has bytes, whatever a normalizer adds


@dataclass
class Record:
    """One usable row.

    Attributes:
        prompt: a sample's `prompt`: the rendered text, or text or messages as in the file.
        messages: the prompt as messages; None for a text that is not rendered.
        where: file and line, for errors.
    """

    prompt: str | list[Message]
    messages: list[Message] | None
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    where: str
    _token_ids: list[int] | None = None

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Token ids of the prompt, as the engine gets them; computed once."""
        if self._token_ids is None:
            text = _text(self, tokenizer, template_kwargs or {})
            self._token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._token_ids


@dataclass
class Dataset(Sequence[Record]):
    """Records in file order, and the rows that were left out: `bad_rows` (with --skip-bad-rows), `num_too_long`."""

    path: str
    records: list[Record]
    bad_rows: list[DataError]
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: Any) -> Any:
        return self.records[i]


def check_file(path_spec: str, row_format: RowFormat = DEFAULT_FORMAT, *, skip_bad_rows: bool = False) -> int:
    """The number of usable rows among the first 100,000 of a data file, checked without a tokenizer.

    Raises:
        ConfigError, DataError: as `load_dataset`.
    """
    bad_rows: list[DataError] | None = [] if skip_bad_rows else None
    num_good = 0
    for _ in read_rows(path_spec, row_format, bad_rows):
        num_good += 1
        if num_good + len(bad_rows or ()) >= NUM_ROWS_CHECKED:
            break
    _refuse_if_nothing(num_good, path_spec, bad_rows or [])
    return num_good


def load_dataset(
    path_spec: str,
    row_format: RowFormat = DEFAULT_FORMAT,
    *,
    apply_chat_template: bool = False,
    apply_chat_template_kwargs: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_len: int | None = None,
    skip_bad_rows: bool = False,
) -> Dataset:
    """Load `path` or `path@[start:stop]` (jsonl or parquet).

    With `apply_chat_template` a prompt becomes text that ends where the assistant's turn begins; a prompt that is text
    is the user's turn. Prompts of more than `max_prompt_len` tokens are left out and counted.

    Raises:
        ConfigError: a malformed path; a chat template or a limit without a tokenizer that can serve it.
        DataError: file missing, unreadable, empty; an unusable row, with file and line (or, with `skip_bad_rows`, no
            usable row at all); no prompt within the limit.
    """
    kwargs = apply_chat_template_kwargs or {}
    if apply_chat_template:
        require_chat_template(tokenizer)
    bad_rows: list[DataError] = []
    records = []
    for row in read_rows(path_spec, row_format, bad_rows if skip_bad_rows else None):
        try:
            records.append(_record(row, tokenizer if apply_chat_template else None, kwargs))
        except DataError as error:
            if not skip_bad_rows:
                raise
            bad_rows.append(error)
    _refuse_if_nothing(len(records), path_spec, bad_rows)
    if bad_rows:
        logger.warning("%s: skipped %d bad rows; the first: %s", path_spec, len(bad_rows), bad_rows[0])
    num_too_long = 0
    if max_prompt_len is not None:
        kept = _within_limit(records, tokenizer, kwargs, max_prompt_len)
        num_too_long = len(records) - len(kept)
        if not kept:
            raise DataError(
                f"all {num_too_long} prompts are longer than {max_prompt_len} tokens",
                where=path_spec,
                remedy="shorten them, or raise --rollout-max-prompt-len as far as the model's context allows",
            )
        if num_too_long:
            logger.warning("%s: skipped %d prompts of more than %d tokens", path_spec, num_too_long, max_prompt_len)
        records = kept
    return Dataset(path_spec, records, bad_rows, num_too_long)


def require_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer, if it has a chat template; otherwise raise ConfigError."""
    if tokenizer is None or not tokenizer.chat_template:
        name = "none was given" if tokenizer is None else f"that of {tokenizer.name_or_path or 'the checkpoint'}"
        raise ConfigError(
            f"--apply-chat-template needs a tokenizer with a chat template; {name}",
            where="--hf-checkpoint (chat_template.jinja or tokenizer_config.json)",
            remedy="use an instruct checkpoint, add its chat template, or leave out --apply-chat-template",
        )
    return tokenizer


def _record(row: Row, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any]) -> Record:
    messages = row.prompt if isinstance(row.prompt, list) else None
    metadata = {**row.metadata, "tools": row.tools} if row.tools else row.metadata
    record = Record(row.prompt, messages, row.label, metadata, row.tools, row.where)
    if tokenizer is not None:
        record.messages = messages or [{"role": "user", "content": row.prompt}]
        record.prompt = _render(tokenizer, record, kwargs)
    return record


def _render(tokenizer: PreTrainedTokenizerBase, record: Record, kwargs: dict[str, Any]) -> str:
    from instep.data.chat import render

    return render(record.messages or [], tokenizer, record.tools, kwargs, generation_prompt=True, where=record.where)


def _within_limit(
    records: list[Record], tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any], limit: int
) -> list[Record]:
    if tokenizer is None:
        raise ConfigError(
            "--rollout-max-prompt-len needs a tokenizer",
            remedy="give --hf-checkpoint",
            where="--rollout-max-prompt-len",
        )
    if any(not isinstance(r.prompt, str) for r in records):
        require_chat_template(tokenizer)
    kept = []
    for start in range(0, len(records), TOKENIZE_AT_ONCE):
        chunk = [(r, _text(r, tokenizer, kwargs)) for r in records[start : start + TOKENIZE_AT_ONCE]]
        chunk = [(r, text) for r, text in chunk if not _is_long(text, tokenizer, limit)]
        unsure = [(r, text) for r, text in chunk if SHORT * len(text.encode()) > limit]
        ids = tokenizer([text for _, text in unsure], add_special_tokens=False)["input_ids"] if unsure else []
        for (record, _), token_ids in zip(unsure, ids, strict=True):
            record._token_ids = token_ids
        kept += [r for r, _ in chunk if r._token_ids is None or len(r._token_ids) <= limit]
    return kept


def _text(record: Record, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> str:
    return record.prompt if isinstance(record.prompt, str) else _render(tokenizer, record, kwargs)


def _is_long(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> bool:
    """Whether a text is over the limit for certain, by the tokens of its beginning.

    So a text of many megabytes is not tokenized whole. A cut changes the tokens near it: twice as many as the limit
    (and 1,000) are asked for. Where a beginning of 16 characters per token has fewer, a longer one decides.
    """
    size = 16 * (limit + 1000)
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > 2 * (limit + 1000):
            return True
        size *= 4
    return False


def _refuse_if_nothing(num_good: int, path_spec: str, bad_rows: list[DataError]) -> None:
    if not num_good:
        raise DataError(
            f"none of the {len(bad_rows)} rows is usable; the first: {bad_rows[0].what}",
            where=bad_rows[0].where or path_spec,
            remedy=bad_rows[0].remedy,
        )
