"""The state of a run and of its checkpoints, read from its folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.checkpoints.folders import read_state
from instep.checkpoints.integrity import TRACKER, check_whole, has_digests
from instep.data.ledger import Ledger
from instep.errors import CheckpointError, ConfigError, InstepError, OutputError
from instep.observability.alarms import describe, first_raised
from instep.observability.figures import duration
from instep.observability.metrics import is_step
from instep.observability.run_folder import state_of
from instep.observability.sinks import read_json, read_json_lines
from instep.observability.versions import versions
from instep.preflight.doctor.check import Check, Status
from instep.preflight.doctor.installation import leftover_folders
from instep.system.scratch import roots


def check_run(run_dir: Path) -> list[Check]:
    """Return all checks of a run's folder. Raises: ConfigError: it is not the folder of a run."""
    if not (run_dir / "config.json").exists():
        what = "no config.json" if run_dir.is_dir() else "no such folder"
        raise ConfigError(what, where=str(run_dir), remedy="give the --run-dir of a run")
    config, summary = read_json(run_dir / "config.json"), read_json(run_dir / "summary.json") or None
    args = config.get("args") or {}
    try:
        rows = read_json_lines(run_dir / "metrics.jsonl")
        metrics = _not_finite(rows)
    except OutputError as error:
        rows = []
        metrics = Check("metrics", "fail", error.what, error.remedy)
    return [
        _config(config.get("title"), args),
        _versions(config),
        _state(run_dir, config, summary),
        metrics,
        _last_step(args, rows),
        _alarms(rows),
        *_checkpoints(args),
        *_ledger(args, summary),
        leftover_folders(roots(run_dir)),
        _disk(run_dir, args),
    ]


def _config(title: str | None, args: dict[str, Any]) -> Check:
    known = ("train_backend", "device", "precision", "hf_checkpoint", "prompt_data")
    return Check("config", "ok", f"{title}; " + ", ".join(f"{n} {args.get(n)}" for n in known))


def _versions(config: dict[str, Any]) -> Check:
    """Compare the versions of the run with the installed versions."""
    then, now = config.get("versions") or {}, versions()
    names = ("instep", "git_commit", "python", "torch", "transformers", "megatron-core", "vllm")
    other = [f"{n} {str(then.get(n))[:12]}, here {str(now.get(n))[:12]}" for n in names if then.get(n) != now.get(n)]
    if other:
        remedy = "a resume here uses other code than the start of the run"
        return Check("versions", "warn", "differ: " + "; ".join(other), remedy)
    return Check("versions", "ok", ", ".join(f"{n} {str(then[n])[:12]}" for n in names if then.get(n)))


def _state(run_dir: Path, config: dict[str, Any], summary: dict[str, Any] | None) -> Check:
    """Check whether the run has finished, is running, or has failed; then with its last lines."""
    state = state_of(run_dir, config, summary)
    level: dict[str, Status] = {"running": "ok", "elsewhere": "warn", "failed": "fail", "killed": "fail"}
    ended: Status = "warn" if state.remedy else "ok"
    return Check("state", level.get(state.name, ended), state.text, state.remedy)


def _last_step(args: dict[str, Any], rows: list[dict[str, Any]]) -> Check:
    steps = [row for row in rows if is_step(row)]
    total = args.get("num_rollout")
    if not steps:
        return Check("last rollout", "warn", f"none of {total} done", "look into logs/ for what it waits for")
    age = time.time() - steps[-1]["time"]
    last = steps[-1]["step"]
    return Check("last rollout", "ok", f"{last} ({last + 1}/{total}; numbers count from 0), {duration(age)} ago")


def _not_finite(rows: list[dict[str, Any]]) -> Check:
    found: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.items():
            if value is None:
                found.setdefault(name, []).append(row["step"])
    if not found:
        return Check("metrics", "ok", f"{len(rows)} rows, all finite")
    text = "; ".join(f"{name} in rollout {', '.join(map(str, steps[:5]))}" for name, steps in found.items())
    return Check("metrics", "fail", f"NaN or infinite: {text}", "lower --lr; look at the samples of these rollouts")


def _alarms(rows: list[dict[str, Any]]) -> Check:
    first = first_raised(rows)
    remedy = "docs/debugging.md explains each alarm and what to try"
    return Check("alarms", "warn" if first else "ok", describe(first), remedy)


def _checkpoints(args: dict[str, Any]) -> Iterator[Check]:
    if not args.get("save"):
        return
    root = Path(args["save"])
    folders = sorted(p for p in root.glob("iter_*") if p.is_dir()) if root.is_dir() else []
    if not folders:
        yield Check("checkpoints", "warn", f"none in {root} yet", "--save-interval sets how often the run saves")
    for folder in folders:
        yield _checkpoint(folder, digests=folder == folders[-1])
    tracker = root / TRACKER
    if folders:
        named = tracker.read_text().strip() if tracker.exists() else "nothing"
        there = named.isdigit() and root / f"iter_{int(named):07d}" in folders
        remedy = f"write the number of a complete iter_ folder into {tracker}"
        yield Check("latest checkpoint", "ok" if there else "fail", f"{TRACKER} names {named}", remedy)
    for left in sorted(p for p in root.glob(".iter_*") if p.is_dir()):
        yield Check(left.name, "warn", "left by an interrupted save", "the next run that saves here repairs it")


def _checkpoint(folder: Path, digests: bool) -> Check:
    """Check that `--load` can resume from the checkpoint. With `digests`, its files are read."""
    try:
        check_whole(folder, digests=digests)
        if read_state(folder) is None:
            return Check(folder.name, "fail", "has no run_state.json", "remove it, or name another with --ckpt-step")
    except CheckpointError as error:
        return Check(folder.name, "fail", error.what, error.remedy)
    how = "complete" if digests and has_digests(folder) else "complete, by the sizes of its files"
    return Check(folder.name, "ok", how)


def _ledger(args: dict[str, Any], summary: dict[str, Any] | None) -> Iterator[Check]:
    """Check the counts of groups in the ledger of the summary, or of the newest checkpoint."""
    state, source, save = (summary or {}).get("ledger"), "summary.json", args.get("save")
    if state is None and save and (paths := sorted(Path(save).glob("iter_*/run_state.json"))):
        source = str(paths[-1])
        try:
            state = json.loads(paths[-1].read_text())["ledger"]
            ledger = Ledger()
            ledger.load_state_dict(state)
            ledger.check()
        except (OSError, ValueError, KeyError) as error:
            yield Check("ledger", "fail", f"{source} cannot be read: {error}", "name another one with --ckpt-step")
            return
        except InstepError as error:
            yield Check("ledger", "fail", f"{source}: {error.what}", error.remedy)
            return
    if state is None:
        return
    dropped = sum(state["dropped"].values())
    left = state["num_issued"] - state["num_consumed"] - dropped
    reasons = "".join(f", {n} {reason}" for reason, n in state["dropped"].items())
    text = f"{state['num_issued']} groups issued, {state['num_consumed']} consumed, {dropped} dropped{reasons}"
    yield Check("ledger", "ok" if left >= 0 else "fail", f"{text}, {left} left ({source})", "please report this")


def _disk(run_dir: Path, args: dict[str, Any]) -> Check:
    save = args.get("save")
    root = Path(save) if save and Path(save).is_dir() else run_dir
    free = shutil.disk_usage(root).free
    folders = sorted(root.glob("iter_*"))
    needed = sum(p.stat().st_size for p in folders[-1].rglob("*") if p.is_file()) if folders else 0
    text = f"{free / 1e9:.1f} GB left at {root}" + (f"; a checkpoint takes {needed / 1e9:.2f} GB" if needed else "")
    return Check("disk", "warn" if free < max(1e9, 2 * needed) else "ok", text, "free space, or save elsewhere")
