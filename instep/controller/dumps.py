"""Dumps of rollouts and of training data, and the replay of a dumped rollout.

Files are torch.save of plain data, so that `torch.load(path, weights_only=True)` reads them:

    rollout: {"rollout_id", "samples": [Sample.to_dict()], "metrics"}; an evaluation has "datasets", a name per sample
    train:   {"rollout_id", "rank": 0, "rollout_data": {name: one entry per sample}}
"""

from __future__ import annotations

import glob
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instep.arguments.settings import DebugSettings, HookSettings
from instep.checkpoints.torch_files import load_plain
from instep.controller.round import TrainedBatch
from instep.errors import CheckpointError, RolloutError
from instep.system.atomic import replacing
from instep.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, name_of

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "special_tokens*")
_TEMPLATES = ("chat_template*", "added_tokens.json", "tokenization_*.py")


def save_rollout(template: str, rollout_id: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Path:
    """Write one rollout to `template`, with {rollout_id} filled in.

    Raises:
        RolloutError: a sample has a value that is not plain data.
        CheckpointError: the file cannot be written.
    """
    samples = [_plain_sample(s) for group in groups for s in group]
    content = {"rollout_id": rollout_id, "samples": samples, "metrics": dict(metrics)}
    return _save(Path(template.format(rollout_id=rollout_id)), content)


def save_evaluation(template: str, rollout_id: int, output: RolloutFnEvalOutput) -> Path:
    """Write one evaluation to `template`; {rollout_id} becomes `eval_` and the number. Errors: see `save_rollout`."""
    pairs = [(name, _plain_sample(s)) for name, result in output.data.items() for s in result["samples"]]
    content = {"rollout_id": rollout_id, "samples": [s for _, s in pairs], "datasets": [name for name, _ in pairs]}
    return _save(Path(template.format(rollout_id=f"eval_{rollout_id}")), content)


def load_rollout(path: Path, share: float | None = None) -> RolloutFnTrainOutput:
    """Read a file of `save_rollout`; `share` keeps only the first groups, this share of them, at least one.

    Raises:
        CheckpointError: there is no such file, or it has other content.
    """
    try:
        content = load_plain(path)
        groups: dict[int | None, Group] = {}
        for sample in (Sample.from_dict(s) for s in content["samples"]):
            groups.setdefault(sample.group_index, []).append(sample)
        metrics = dict(content.get("metrics", {}))
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the rollout cannot be replayed: {why}",
            where=str(path),
            remedy="--load-debug-rollout-data must name files of --save-debug-rollout-data, one for each rollout",
        ) from error
    kept = list(groups.values())
    if share is not None:
        kept = kept[: max(1, math.floor(share * len(kept)))]
    return RolloutFnTrainOutput(kept, metrics)


def replay(args: DebugSettings) -> Callable[..., RolloutFnTrainOutput]:
    """Return a rollout function that reads `--load-debug-rollout-data` instead of generating."""
    template, share = str(args.load_debug_rollout_data), args.load_debug_rollout_data_subsample

    def replayed(hook_args: HookSettings, rollout_id: int, *_: Any, **__: Any) -> RolloutFnTrainOutput:
        return load_rollout(Path(template.format(rollout_id=rollout_id)), share)

    return replayed


def save_train_data(template: str, rollout_id: int, trained: TrainedBatch) -> Path:
    """Write the training batch with its computed columns, sample by sample in the order of the rollout.

    Besides the batch's columns: `step` (the optimizer step within the rollout; -1: left out) and `train_log_probs`:
    the trainer's log-probs with the weights at the start of the round (None where they were not computed). `entropy` is
    the policy's, as the sample's step found it.
    """
    batch, lengths = trained.batch, trained.batch.response_lengths.tolist()
    data: dict[str, Any] = {
        "tokens": _rows(batch.tokens, batch.total_lengths.tolist()),
        "total_lengths": batch.total_lengths.tolist(),
        "response_lengths": lengths,
        "step": trained.step_of_sample,
        "train_log_probs": [trained.log_probs.get(i) for i in range(batch.num_samples)],
        "entropy": [trained.entropies.get(i) for i in range(batch.num_samples)],
    }
    data |= {name: _rows(column, lengths) for name, column in batch.token_columns.items()}
    for name in ("group_index", "index", "temperature", "rewards", "raw_reward"):
        if name in batch.sample_columns:
            data[name] = batch.sample_columns[name].tolist()
    data |= {name: list(batch.sample_columns[name]) for name in ("execution_id", "status")}
    path = Path(template.format(rollout_id=rollout_id, rank=0))
    return _save(path, {"rollout_id": rollout_id, "rank": 0, "rollout_data": data})


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copy the tokenizer files of a Hugging Face checkpoint, so that a dump is readable without the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (*_TOKENIZER_FILES, *_TEMPLATES, "config.json"):
        for path in glob.glob(os.path.join(glob.escape(str(checkpoint)), pattern)):
            if os.path.isfile(path):
                shutil.copy(path, folder)


def _rows(flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [row.clone() for row in flat.split(lengths)]  # a saved view would include its whole storage


def _plain_sample(sample: Sample) -> dict[str, Any]:
    return {k: _plain(v, f"{name_of(sample)}: {k}") for k, v in sample.to_dict().items()}


def _plain(value: Any, where: str) -> Any:
    """Convert `value` to data for `torch.load(weights_only=True)`; numbers and arrays of numpy become Python's.

    Raises:
        RolloutError: `value` has an object of another type.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {_plain(k, where): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items: Iterable[Any] = (_plain(v, where) for v in value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    for kind in (str, int, float):  # subclasses, such as an Enum's
        if isinstance(value, kind):
            return kind(value)
    raise RolloutError(
        f"a {type(value).__name__} cannot be dumped",
        where=where,
        remedy="keep numbers, strings, lists, dicts and tensors in samples, or remove --save-debug-rollout-data",
    )


def _save(path: Path, content: dict[str, Any]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            torch.save(content, part)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        what = f"a dump could not be written: {error}"
        raise CheckpointError(what, where=str(path), remedy="free space or fix permissions") from error
    return path
