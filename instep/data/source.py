"""The data source: a data set that is read epoch after epoch, and a buffer of groups that were given back."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from instep.arguments.settings import DataSettings, Settings
from instep.checkpoints.state_json import to_text
from instep.data.dataset import check_tokens, load_dataset, options_of, tell_of_bos
from instep.data.formats import row_format
from instep.data.mixture import Mixture
from instep.data.rows import split_files
from instep.data.tokenizer import tokenizer_of
from instep.errors import ConfigError, DataError, RolloutError
from instep.system.hooks import Hook
from instep.system.hooks.neighbours import is_own
from instep.system.hooks.user_code import said
from instep.types import Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POP_FIRST = "instep.data.source.pop_first"


class RolloutDataSourceWithBuffer:
    """A source of groups of `args.n_samples_per_prompt` samples. Groups that were given back come before fresh ones.

    Each epoch passes over the whole data set, in file order or with `rollout_shuffle` in an order that depends only on
    `rollout_seed + epoch`. `instep.data.mixture` describes several files. Its state is the cursor (a few numbers) and
    the buffered groups; the same state gives the same samples again. `sample.extra["where"]` is the file and line of a
    prompt, for errors. All methods may be called from several threads.

    Args:
        tokenizer: default: that of `args.hf_checkpoint`, if one is needed.

    Raises:
        ConfigError, DataError, OutputError: as `load_dataset`.
        CheckpointError: the tokenizer cannot be loaded.
    """

    def __init__(self, args: Settings, tokenizer: PreTrainedTokenizerBase | None = None):
        self.args = args
        self.dataset = self.read(args, tokenizer) if args.rollout_global_dataset else None
        self.buffer: list[Group] = []
        self._filter = Hook("--buffer-filter-path", args.buffer_filter_path or POP_FIRST)
        self._counts = [] if self.dataset is None else self.dataset.start()
        self._next_group = self._next_sample = 0
        self._lock = threading.RLock()

    def read(self, args: Settings, tokenizer: PreTrainedTokenizerBase | None) -> Mixture:
        """The data set, when the source is made. Raises: as the class."""
        if not args.prompt_data:
            raise ConfigError("no data to train on", where="--prompt-data", remedy="give a .jsonl or .parquet file")
        if tokenizer is None and (args.apply_chat_template or args.rollout_max_prompt_len is not None):
            tokenizer = tokenizer_of(args)
        more = {"tokenizer": tokenizer, "max_prompt_len": args.rollout_max_prompt_len, **options_of(args)}
        datasets = [load_dataset(file, row_format(args), **more) for file in split_files(args.prompt_data)]
        return Mixture(datasets, args.prompt_data_weights, args.rollout_seed if args.rollout_shuffle else None)

    def __len__(self) -> int:
        """Return the number of prompts of the data set; 0 without one."""
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_groups: int) -> list[Group]:
        """Return the next groups, buffered ones before fresh ones. A new epoch begins where the data set ends.

        Raises:
            ConfigError: there is no data set, and the buffer does not hold enough groups.
            RolloutError: the buffer filter did not return a list of at most `num_groups` groups.
        """
        with self._lock:
            groups = self._filter.call(self.args, None, self.buffer, num_groups) if self.buffer else []
            if not isinstance(groups, list) or len(groups) > num_groups:
                expected = f"a list of at most {num_groups} groups, taken out of the buffer it was given"
                raise self._filter.wrong(groups, expected)
            groups = [checked_group(g, self._filter.place()) for g in groups]
            return groups + [self._fresh_group() for _ in range(num_groups - len(groups))]

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back, such as aborted ones. They come out before fresh ones, in this order."""
        checked = [checked_group(g) for g in groups]
        with self._lock:
            self.buffer.extend(checked)

    def cursor(self) -> dict[str, Any]:
        """Return the state without the buffer. The ledger takes it before each `get_samples`.

        With it a resume reads the groups again that were outstanding when the checkpoint was written.
        """
        with self._lock:
            read = list(self._counts)
            return {"num_read": read, "next_group": self._next_group, "next_sample": self._next_sample}

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, the buffered groups, and the contents of the files, as values for a checkpoint."""
        with self._lock:
            buffer = [[copy.deepcopy(s.to_dict()) for s in group] for group in self.buffer]
            return {**self.cursor(), "files": self._files(), "buffer": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a `state_dict()`, or to a `cursor()` with an empty buffer.

        Raises:
            DataError: a file has other usable rows than when the state was taken.
        """
        self.check_files(state)
        with self._lock:
            self._counts = list(state["num_read"])
            self._next_group, self._next_sample = state["next_group"], state["next_sample"]
            self.buffer = [[Sample.from_dict(copy.deepcopy(s)) for s in g] for g in state.get("buffer", [])]

    def check_files(self, state: dict[str, Any]) -> None:
        """Compare file contents with a `state_dict()`. Raises: DataError, which names the first difference."""
        now = self._files()
        for old, new in zip(state.get("files", now), now, strict=True):
            if old["digest"] == new["digest"] and old["num_rows"] == new["num_rows"]:
                continue
            what = f"the data set has {new['num_rows']} usable prompts, but {old['num_rows']} when the state was saved"
            if old["num_rows"] == new["num_rows"]:
                what = f"the {new['num_rows']} usable prompts differ from those when the state was saved"
            remedy = "resume with the same data file, slice and limits; or start a new run with other data"
            raise DataError(what, where=new["path"], remedy=remedy)

    def _files(self) -> list[dict[str, Any]]:
        datasets = [] if self.dataset is None else self.dataset.datasets
        return [{"path": d.path, "num_rows": len(d), "digest": d.digest} for d in datasets]

    def _fresh_group(self) -> Group:
        if self.dataset is None:
            what = "there is no data set to take prompts from and the buffer is empty"
            remedy = "give --prompt-data, or a rollout function that makes its own samples"
            raise ConfigError(what, where="--disable-rollout-global-dataset", remedy=remedy)
        record = self.dataset.next(self._counts)
        group_index, self._next_group = self._next_group, self._next_group + 1
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            prompt, label, metadata = copy.deepcopy((record.prompt, record.label, record.metadata))
            sample = Sample(group_index=group_index, index=self._next_sample, prompt=prompt, label=label)
            sample.metadata, sample.extra = metadata, {"where": record.where}
            self._next_sample += 1
            group.append(sample)
        return group


class UserSource:
    """A user's data source. If its methods raise or return something wrong, the error names the source.

    All else is passed through, even whether a method exists.
    """

    __slots__ = ("hook", "source")

    def __init__(self, hook: Hook, args: Any):
        """Make the source with `args`. Raises: RolloutError, ConfigError, DataError."""
        object.__setattr__(self, "hook", hook)
        object.__setattr__(self, "source", hook.call(args, where="when it was made"))
        if not hasattr(self.source, "get_samples"):
            raise hook.wrong(self.source, "a data source with get_samples; see instep/data/source.py for its methods")

    def get_samples(self, num_groups: int) -> list[Group]:
        where = f"get_samples({num_groups})"
        with self.hook.guard(where):
            groups = self.source.get_samples(num_groups)
        if not isinstance(groups, list):
            raise self.hook.wrong(groups, "a list of groups, which are lists of Sample", where)
        place = self.hook.place(where)
        groups = [checked_group(group, place) for group in groups]
        if any(sample.group_index is None for group in groups for sample in group):
            raise RolloutError("a sample has no group_index", where=place, remedy="give each group a distinct number")
        return groups

    def __len__(self) -> int:
        with self.hook.guard("its length, for --num-epoch"):
            return len(self.source)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.source, name)
        if not callable(value):
            return value

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.hook.guard(name):
                out = value(*args, **kwargs)
            if name in ("state_dict", "cursor"):  # a checkpoint holds it
                with self.hook.reading(out, "a state that is JSON: numbers, strings, lists, dicts", name):
                    to_text(out)
            return out

        return called

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.source, name, value)


def load_source(args: Settings, hook_args: Any, vocab_size: int | None = None) -> Any:
    """Return the data source of a run. Raises: RolloutError, ConfigError, DataError.

    Args:
        vocab_size: of the model. instep's own sources refuse a prompt with a larger token id.
    """
    hook = Hook("--data-source-path", args.data_source_path)
    if not is_own(hook.path):
        return UserSource(hook, hook_args)
    source = hook.function(hook_args)
    if vocab_size is not None and source.dataset is not None:
        tokenizer = tokenizer_of(args)
        for records in source.dataset.datasets:
            check_tokens(records, tokenizer, args.apply_chat_template_kwargs, vocab_size)
            tell_of_bos(args, records.path, records, tokenizer)
    return source


def num_rollouts(args: DataSettings, source: Sized) -> int:
    """Return the number of rounds: `--num-rollout`, or the whole rounds in `--num-epoch` passes over the prompts."""
    if args.num_rollout is not None:
        return args.num_rollout
    return math.ceil((args.num_epoch or 0) * len(source) / args.rollout_batch_size)


def pop_first(args: Settings, rollout_id: int | None, buffer: list[Group], num_groups: int) -> list[Group]:
    """Return the first groups of the buffer (the default filter). A filter removes its result from `buffer`."""
    taken = buffer[:num_groups]
    del buffer[:num_groups]
    return taken


def checked_group(group: Any, where: str = "data_source.add_samples") -> Group:
    if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in group):
        what = f"a group must be a list of samples, not {said(group, 80)}"
        raise RolloutError(what, remedy="return whole groups, as flat lists", where=where)
    if len({s.group_index for s in group}) != 1:
        what = f"samples of groups {sorted({str(s.group_index) for s in group})} are in one group"
        raise RolloutError(what, remedy="return samples in the groups they came in", where=where)
    return group
