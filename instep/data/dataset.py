"""Data sets of prompts from jsonl or parquet files: checked, rendered, limited in length. It does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, cast

import xxhash

from instep.arguments.settings import HookSettings, Settings
from instep.data.index import Found, Index, is_large, num_indexed
from instep.data.rows import BadRows, RawRow, Record, RowFormat, parse_row, read_rows
from instep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FORMAT = RowFormat()
logger = logging.getLogger(__name__)
NUM_ROWS_CHECKED = 100_000  # check_file leaves the other rows to load_dataset
TOKENIZE_AT_ONCE = 1024
SHORT = 4  # a text has at most this many times as many tokens as bytes, with any normalizer


@dataclass
class Dataset(Sequence[Record]):
    """Records in file order, and counts of the rows left out: `bad_rows` (with --skip-bad-rows), `num_too_long`.

    Attributes:
        records: in memory, or for a large file read on request.
        digest: of the content of all usable rows, in order.
    """

    path: str
    records: Sequence[Record]
    bad_rows: BadRows
    num_too_long: int
    digest: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: Any) -> Any:
        return self.records[i]


def check_file(
    path_spec: str,
    row_format: RowFormat = DEFAULT_FORMAT,
    *,
    skip_bad_rows: bool = False,
    cache_path: str | None = None,
) -> int:
    """Return the number of usable rows among the first 100,000 of a data file, checked without a tokenizer.

    A large file with an index is not read again. Then the number counts all its rows.

    Raises:
        ConfigError, DataError: as `load_dataset`.
    """
    if (known := num_indexed(path_spec, [asdict(row_format), skip_bad_rows], cache_path)) is not None:
        return known
    bad_rows = BadRows() if skip_bad_rows else None
    num_good = 0
    for _ in read_rows(path_spec, row_format, bad_rows):
        num_good += 1
        if num_good + (bad_rows.num if bad_rows else 0) >= NUM_ROWS_CHECKED:
            break
    _refuse_if_nothing(num_good, path_spec, bad_rows or BadRows())
    return num_good


def load_dataset(
    path_spec: str,
    row_format: RowFormat = DEFAULT_FORMAT,
    *,
    apply_chat_template: bool = False,
    apply_chat_template_kwargs: dict[str, Any] | None = None,
    add_bos_token: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_len: int | None = None,
    skip_bad_rows: bool = False,
    cache_path: str | None = None,
) -> Dataset:
    """Load `path` or `path@[start:stop]` (jsonl or parquet).

    With `apply_chat_template` a prompt becomes text that ends where the assistant's turn begins; a text prompt is the
    user's turn. Prompts of more than `max_prompt_len` tokens are left out and counted. A large file gets an index in
    `cache_path` (see `instep.data.index`), and stays on disk.

    Raises:
        ConfigError: a malformed path; a chat template or a limit without a suitable tokenizer.
        DataError: file missing, unreadable, empty; an unusable row, with file and line (or, with `skip_bad_rows`, no
            usable row at all); no prompt within the limit.
        OutputError: the index cannot be written.
    """
    if apply_chat_template:
        require_chat_template(tokenizer)
    use = _Use(
        row_format, apply_chat_template, apply_chat_template_kwargs or {}, max_prompt_len, tokenizer, add_bos_token
    )
    chunks = partial(_usable, path_spec, use, skip_bad_rows)
    if is_large(path_spec):
        checked = [asdict(row_format), skip_bad_rows]
        index = Index.of(path_spec, checked, use.identity(), cache_path, chunks, use.record_of)
        found, records = index.found, cast(Sequence[Record], index)
    else:
        found = Found()
        records = [record for chunk in chunks(found) for _, _, record in chunk]
    _refuse_if_nothing(len(records) + found.num_too_long, path_spec, found.bad_rows)
    if found.bad_rows.num:
        first = found.bad_rows.errors[0]
        logger.warning("%s: skipped %d bad rows; the first: %s", path_spec, found.bad_rows.num, first)
    if not records:
        what = f"all {found.num_too_long} prompts are longer than {max_prompt_len} tokens"
        remedy = "shorten them, or raise --rollout-max-prompt-len as far as the model's context allows"
        raise DataError(what, where=path_spec, remedy=remedy)
    if found.num_too_long:
        logger.warning("%s: skipped %d prompts of more than %d tokens", path_spec, found.num_too_long, max_prompt_len)
    return Dataset(path_spec, records, found.bad_rows, found.num_too_long, found.digest)


def options_of(args: HookSettings | Settings) -> dict[str, Any]:
    """Return the keywords of `load_dataset` that flags set for all data sets of a run."""
    return {
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "add_bos_token": args.add_bos_token,
        "skip_bad_rows": args.skip_bad_rows,
        "cache_path": args.data_cache_path,
    }


def require_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer if it has a chat template; otherwise raise ConfigError."""
    if tokenizer is None or not tokenizer.chat_template:
        name = "none was given" if tokenizer is None else f"that of {tokenizer.name_or_path or 'the checkpoint'}"
        what = f"--apply-chat-template needs a tokenizer with a chat template; {name}"
        remedy = "use an instruct checkpoint, or --chat-template FILE, or remove --apply-chat-template"
        raise ConfigError(what, where="--hf-checkpoint (chat_template.jinja or tokenizer_config.json)", remedy=remedy)
    return tokenizer


def check_tokens(records: Iterable[Record], tokenizer: Any, kwargs: dict[str, Any], num_rows: int) -> None:
    """Refuse a prompt with a token id outside the model's table of `num_rows` tokens. Raises: DataError."""
    beyond = tokenizer.batch_decode([[i] for i in range(num_rows, len(tokenizer))])
    for record in records if beyond else ():
        text = _text(record, tokenizer, kwargs)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if any(one in text for one in beyond) else []
        if (last := max(ids, default=0)) >= num_rows:
            what = f"{tokenizer.decode([last])!r} is token {last} of the tokenizer, the model has {num_rows} tokens"
            raise DataError(what, where=record.where, remedy="fix the row, or use the tokenizer of this model")


def tell_of_bos(args: HookSettings | Settings, path: str, records: Sequence[Record], tokenizer: Any) -> None:
    """Warn if prompts lack the begin-of-text token that the tokenizer would add."""
    prompt, bos = records[0].prompt, tokenizer.bos_token
    chosen = args.add_bos_token or args.apply_chat_template or args.custom_generate_function_path
    if chosen or bos is None or not isinstance(prompt, str) or prompt.startswith(bos):
        return
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        what = "the tokenizer begins a text with %s, but these prompts do not; --add-bos-token adds it"
        logger.warning(f"%s: {what}", path, bos)


@dataclass
class _Use:
    """How rows become records, and which are left out."""

    row_format: RowFormat
    template: bool
    kwargs: dict[str, Any]
    limit: int | None
    tokenizer: PreTrainedTokenizerBase | None
    add_bos: bool = False

    def record_of(self, line: bytes, where: str) -> Record:
        return self.rendered(parse_row(line, where, self.row_format))

    def rendered(self, record: Record) -> Record:
        """Return the record with the prompt of a sample."""
        if self.template and self.tokenizer is not None:
            record.messages = record.prompt = record.messages or [{"role": "user", "content": record.prompt}]
            record.prompt = _text(record, self.tokenizer, self.kwargs)
        return record

    def limited_text(self, record: Record) -> str:
        """Return the text whose tokens the limit counts; empty without a limit."""
        if self.limit is None:
            return ""
        if not isinstance(record.prompt, str):
            require_chat_template(self.tokenizer)
        return _text(record, self.tokenizer, self.kwargs)

    def identity(self) -> list[Any]:
        """Return everything except the rows that decides which of them are left out."""
        if self.tokenizer is None or not (self.template or self.limit is not None):
            return []
        import transformers

        one, version = self.tokenizer, transformers.__version__
        words = one.backend_tokenizer.to_str() if one.is_fast else [repr(one), one.get_vocab()]
        add = ["bos"] if self.add_bos else []
        return [self.template, self.kwargs, self.limit, one.chat_template, one.special_tokens_map, words, version, *add]


def _usable(
    path_spec: str, use: _Use, skip_bad_rows: bool, found: Found
) -> Iterator[list[tuple[RawRow, bytes, Record]]]:
    """Yield the rows that are trained on, in chunks. `found` gets the counts, and at the end the digest."""
    digest = xxhash.xxh3_128()
    rows = read_rows(path_spec, use.row_format, found.bad_rows if skip_bad_rows else None)
    while some := list(islice(rows, TOKENIZE_AT_ONCE)):
        chunk, texts = [], []
        for raw, line, record in some:
            try:
                use.rendered(record)
                texts.append(use.limited_text(record))
            except DataError as error:
                if not skip_bad_rows:
                    raise
                found.bad_rows.add(error)
                continue
            chunk.append((raw, line, record))
            digest.update(line.strip() + b"\n")
        if use.limit is not None and use.tokenizer is not None:
            bos = use.tokenizer.bos_token_id if use.add_bos else None
            begins = [bos if isinstance(record.prompt, str) else None for _, _, record in chunk]
            fits = _within_limit(texts, begins, use.tokenizer, use.limit)
            found.num_too_long += fits.count(False)
            chunk = list(compress(chunk, fits))
        found.num_rows += len(chunk)
        yield chunk
    found.digest = digest.hexdigest()


def _within_limit(
    texts: list[str], begins: list[int | None], tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[bool]:
    """Return whether each text has at most `limit` tokens; `begins` are the tokens put before them, if any."""
    fits = [True] * len(texts)
    unsure = [i for i, text in enumerate(texts) if SHORT * len(text.encode()) > limit]
    ids = tokenizer([texts[i] for i in unsure], add_special_tokens=False)["input_ids"] if unsure else []
    for i, token_ids in zip(unsure, ids, strict=True):
        fits[i] = len(token_ids) + (begins[i] not in (None, *token_ids[:1])) <= limit
    return fits


def _text(record: Record, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> str:
    from instep.data.chat import render

    if isinstance(record.prompt, str):
        return record.prompt
    return render(record.prompt, tokenizer, record.tools, kwargs, generation_prompt=True, where=record.where)


def _refuse_if_nothing(num_good: int, path_spec: str, bad_rows: BadRows) -> None:
    if not num_good:
        first = bad_rows.errors[0]
        what = f"none of the {bad_rows.num} rows is usable; the first: {first.what}"
        raise DataError(what, where=first.where or path_spec, remedy=first.remedy)
