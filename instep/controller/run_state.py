"""The state for a resume: counters, ledger, data source, and the arguments that must stay the same."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from instep.arguments.args import Args
from instep.arguments.settings import ModelSettings, Settings
from instep.checkpoints.folders import RELEASE, find_checkpoint, has_optimizer, read_state
from instep.checkpoints.integrity import TRACKER, has_digests, others
from instep.checkpoints.state_json import SAVABLE, to_text
from instep.data.ledger import LedgeredDataSource, group_indices
from instep.errors import CheckpointError, ConfigError, RolloutError
from instep.observability.run_folder import config_of
from instep.types import Group, Sample, name_of

# A run cannot change these: it would train on other data, twice on the same data, or read other files.
_FIXED = (
    "command max_staleness prompt_data prompt_data_weights data_source_path input_key label_key "
    "apply_chat_template chat_template_text add_bos_token rollout_max_prompt_len "
    "rollout_seed rollout_shuffle n_samples_per_prompt train_backend"
).split()
_ORDER = ("num_threads", "use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size")  # the order of sums
# These do not identify a run: the places where it reads and writes, and values derived from other arguments.
_PLACES = frozenset(
    "load save save_hf chat_template critic_load critic_save megatron_config_path run_dir data_cache_path "
    "ckpt_step ref_ckpt_step engine_port ray_address dp_size world_size rollout_num_engines notes".split()
)
# The fields of a sample with an entry per token; they are always plain.
_COLUMNS = frozenset("tokens loss_mask rollout_log_probs rollout_routed_experts weight_versions".split())
# With these flags the same command would begin elsewhere.
_NOT_AGAIN = {"--ckpt-step": "ckpt_step", "--finetune": "finetune", "--start-rollout-id": "start_rollout_id"}


class Beginning(NamedTuple):
    """The checkpoint and state that a session begins with."""

    checkpoint: Path | None  # in `--load`
    state: dict[str, Any] | None  # of the controller, if a run is resumed
    notes: list[str]  # lines for the user: changed values, and other unusual facts
    rollout_id: int  # of the first round
    run_id: str | None  # of the resumed run or a new one; None if an earlier instep began the run
    foreign_optimizer: bool = False  # whether `checkpoint` is of another framework, and its optimizer is used


def beginning(args: Args) -> Beginning:
    """Find the start of the session from `--load`, `--ckpt-step`, `--finetune` and `--start-rollout-id`.

    Raises:
        CheckpointError: there is no such checkpoint, or its state is damaged.
        ConfigError: the run cannot continue with other arguments, or in the folder of another run.
    """
    found = find_checkpoint(Path(args.load) if args.load else None, args.ckpt_step)
    if found is None:
        return Beginning(None, None, [], start_rollout_id(args, None, None), uuid.uuid4().hex)
    folder = found[0]
    state = None if args.finetune else read_state(folder)
    run_id = uuid.uuid4().hex if state is None else _same_run(Path(args.run_dir), folder, state)
    changed = changed_arguments(state["args"], args) if state else []
    notes = [f"changed since the checkpoint: {line}" for line in changed]
    if args.ckpt_step is None and not (folder.parent / TRACKER).exists():
        notes.append(f"{folder.parent / TRACKER} is missing: this is the newest complete checkpoint, {folder.name}")
    if not has_digests(folder):
        notes.append(f"{folder} has no digests (of an earlier instep): only the sizes of its files were compared")
    foreign = state is None and not args.finetune
    with_optimizer = foreign and found[1] != RELEASE and not args.no_load_optim and has_optimizer(folder)
    if foreign:
        taken = "weights and its optimizer's state" if with_optimizer else "weights alone"
        notes.append(f"{folder} is of another framework: the run takes its {taken}, and reads its data from the start")
    return Beginning(folder, state, notes, start_rollout_id(args, found, state), run_id, with_optimizer)


def _same_run(run_dir: Path, checkpoint: Path, state: dict[str, Any]) -> str | None:
    """Return the identity of the run that wrote `checkpoint`.

    Raises:
        ConfigError: `run_dir` has the files of another run; they would be cut and continued.
    """
    run_id, there = state.get("run_id"), config_of(run_dir)
    if there is None or there.get("run_id") == run_id:
        return run_id
    old = [path.parent for path in sorted(run_dir.glob("old-*/config.json"))]
    own = next((p for p in old if (config_of(p) or {}).get("run_id") == run_id), state["args"].get("run_dir"))
    raise ConfigError(
        f"{run_dir} holds the files of another run than the one that {checkpoint} belongs to",
        where="--run-dir",
        remedy=f"name that run's folder (it was {own}), or a new one; --finetune begins a new run with its weights",
    )


def how_to_go_on(args: ModelSettings, run_id: str | None) -> str:
    """Return how the ending run `run_id` can continue: from which checkpoint, by which command."""
    begins = f"the same command starts again{f' from {args.load}' if args.load else ''}"
    if not args.save:
        return f"nothing was saved (no --save): {begins}"
    try:
        saved = find_checkpoint(Path(args.save), None)
        if saved is not None and (read_state(saved[0]) or {}).get("run_id") != run_id:
            saved = None  # the checkpoint of an earlier run
    except CheckpointError as error:
        return f"check the checkpoints in {args.save}: {error.what}"
    if saved is None:
        interval = "no --save-interval" if args.save_interval is None else f"--save-interval {args.save_interval}"
        return f"nothing was saved yet ({interval}): {begins}"
    same = args.load is not None and Path(args.load).resolve() == Path(args.save).resolve()
    more = [] if same else [f"with --load {args.save}"]
    more += [f"without {flag}" for flag, given in _NOT_AGAIN.items() if getattr(args, given) not in (None, False)]
    changes = f", {', '.join(more)}," if more else ""
    return f"the last checkpoint is {saved[0]}: the same command{changes} goes on from it"


def start_rollout_id(args: ModelSettings, checkpoint: tuple[Path, int] | None, state: dict[str, Any] | None) -> int:
    """Return the number of the first rollout: the given one, or the one after the resumed `state` or checkpoint."""
    if args.start_rollout_id is not None:
        return int(args.start_rollout_id)
    if state is not None:
        return int(state["rollout_id"]) + 1
    return checkpoint[1] + 1 if checkpoint is not None and not args.finetune else 0


def changed_arguments(before: dict[str, Any], args: Args) -> list[str]:
    """Return a line for each argument whose value has changed since the checkpoint.

    Raises:
        ConfigError: one of them cannot change during a run.
    """
    now = json.loads(json.dumps(args.to_dict()))
    changed = {
        name: f"--{name.replace('_', '-')} was {_shown(before.get(name))} and is {_shown(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if name not in _PLACES and before.get(name) != now.get(name) and (name in before or now[name])  # of a new flag
    }
    fixed = (*_FIXED, *_ORDER) if args.deterministic_mode else _FIXED
    refused = [line for name, line in changed.items() if name in fixed]
    if refused:
        raise ConfigError(
            "; ".join(refused),
            where="the checkpoint in --load belongs to another run",
            remedy="use the same values to continue it, or --finetune to take only its weights",
        )
    return list(changed.values())


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def source_state(source: Any, rollout_id: int) -> Any:
    """Return the data source's state as JSON, or None if the source saves it itself (slime's `save(rollout_id)`)."""
    if hasattr(source, "state_dict"):
        return source.state_dict()
    source.save(rollout_id)
    return None


def restore_source(source: Any, state: Any, rollout_id: int) -> None:
    """Restore the data source from `source_state`, or let it load its own state (`load(rollout_id)`)."""
    if hasattr(source, "load_state_dict"):
        source.load_state_dict(state)
    else:
        source.load(rollout_id)


def check_savable(args: Settings, samples: Iterable[Sample]) -> None:
    """Raise RolloutError for a sample that a checkpoint may have to store, but cannot."""
    if not args.save or not (args.command == "train-async" or args.partial_rollout):
        return
    for sample in samples:
        for name, value in sample.to_dict().items():
            if name in _COLUMNS:
                continue
            try:
                to_text(value)
            except (TypeError, ValueError) as error:
                what = f"a checkpoint cannot hold {name} of a sample: {error}"
                raise RolloutError(what, where=name_of(sample), remedy=SAVABLE) from error


def data_state(data: LedgeredDataSource, rollout_id: int) -> dict[str, Any]:
    """Return the state of ledger and data source for a checkpoint, from one instant: a rollout may be running."""
    with data.books_lock:
        return {"ledger": data.ledger.state_dict(), "data_source": source_state(data.source, rollout_id)}


def restore_data(data: LedgeredDataSource, state: dict[str, Any], rollout_id: int, folder: Path) -> None:
    """Restore `data_state`. Finished groups return unchanged; issued groups are read again into the source's buffer.

    These groups are fresh and draw the same random numbers again. Groups of a data source without `cursor()` return
    as they were when they were issued.

    Raises:
        CheckpointError: ledger or data source cannot return to that state; `folder` is its checkpoint.
    """
    source, ledger = data.source, data.ledger
    try:
        ledger.load_state_dict(state["ledger"])
        again: dict[int, Group] = {}
        for read in state["ledger"].get("reads", []):
            source.load_state_dict(read["cursor"])
            groups = source.get_samples(len(read["groups"]))
            again.update(zip(group_indices(groups), groups, strict=True))
        restore_source(source, state["data_source"], rollout_id)
        if again:
            data.add_samples([again[group] for group in ledger.issued if group in again])
        data.give_again([[Sample.from_dict(s) for s in group] for group in state["ledger"].get("again", [])])
        ledger.drop_outstanding("outstanding at a save")  # of an earlier instep, without copies
        ledger.check()
    except (LookupError, TypeError, ValueError, AttributeError, RolloutError) as error:
        why = error.what if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the state of ledger and data source cannot be restored: {why}",
            where=str(folder / "run_state.json"),
            remedy=f"restore the file, fix your own data source, or {others(folder)}",
        ) from error
