"""The report of a run: one self-contained report.html with headline figures, plots, samples and configuration."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from instep.observability.alarms import describe, first_raised
from instep.observability.figures import duration, number
from instep.observability.plots import PLOTS, History, read_history
from instep.observability.sinks import json_lines, read_json, read_json_lines
from instep.system.atomic import write_text

TEMPLATE = Path(__file__).with_name("report.jinja")


def make_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from config.json, metrics.jsonl, summary.json and samples.jsonl.

    Files that are missing, because the run was stopped early, are left out.
    """
    run_dir = Path(run_dir)
    config, summary = read_json(run_dir / "config.json"), read_json(run_dir / "summary.json")
    history = read_history(read_json_lines(run_dir / "metrics.jsonl"))
    samples = (row for _, row in json_lines(run_dir / "samples.jsonl"))  # in all they may be larger than memory
    plots = [svg for plot in PLOTS.values() if (svg := plot(history)) is not None]
    versions = summary.get("versions") or config.get("versions") or {}
    html = jinja2.Environment(autoescape=True, keep_trailing_newline=True)
    html.filters["text"] = _text
    page = html.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=str(config.get("title") or run_dir.resolve().name),
        subtitle=_subtitle(history, versions, summary),
        figures=headline(history, summary),
        plots=[base64.b64encode(svg.encode()).decode() for svg in plots],
        samples=_samples(samples),
        details=[
            ("Summary", True, {k: v for k, v in summary.items() if k != "versions"}),
            ("Last step", False, history.steps[-1][1] if history.steps else {}),
            ("Configuration", False, config.get("args") or {}),
            ("Versions", True, versions),
        ],
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def headline(history: History, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that a reader looks for first, as far as they are known: `[(label, value)]`."""
    found: list[tuple[str, str]] = []

    def add_course(label: str, name: str, digits: int = 3) -> bool:
        if values := history.column(name)[1]:
            first, last = number(values[0], digits), number(values[-1], digits)
            found.append((f"{label}, first \u2192 last", f"{first} \u2192 {last}"))
        return bool(values)

    before, after = summary.get("eval_reward_before"), summary.get("eval_reward_after")
    sets = {n.removeprefix("eval/").removesuffix("/reward_mean"): n for n in history.names("eval/", "/reward_mean")}
    if before is not None or after is not None:
        name = next(iter(sets), "held-out")  # the first is the summary's
        found.append((f"{name}: reward, before \u2192 after", f"{number(before)} \u2192 {number(after)}"))
    else:
        for name, metric in sets.items():
            add_course(f"eval {name}", metric)
    rewarded = add_course("training reward", "rollout/reward_mean")
    if not rewarded:
        add_course("loss", "train/loss", 4)
    for name in ("accuracy", "margin"):  # of pairs
        add_course(name, f"train/reward_{name}")
    if not rewarded and (masked := history.column("rollout/masked_ratio")[1]):
        found.append(("masked tokens (not trained on)", f"{sum(masked) / len(masked):.0%}"))
    if history.steps:
        found.append(("rollouts", f"{len(history.steps):,}"))
    if summary.get("num_steps"):
        found.append(("optimizer steps", f"{summary['num_steps']:,}"))
    wall = summary.get("wall_seconds") or sum(history.column("perf/step_seconds")[1])
    if wall:
        found.append(("wall time" if summary.get("wall_seconds") else "time in steps", duration(wall)))
    peaks = history.column("perf/peak_pss_bytes")[1] or history.column("perf/pss_bytes")[1]
    peak = summary.get("peak_pss_bytes") or max(peaks, default=None)
    if peak:
        found.append(("peak memory (PSS)", f"{peak / 1e9:.2f} GB"))
    gaps = history.column("train/log_prob_gap_mean")[1]
    if gaps:
        found.append(("largest mean log-prob gap to the engine", f"{max(gaps):.1e}"))
    elif history.names("train/log_prob_gap_mean"):
        found.append(("log-prob gap to the engine", "not available"))
    probes = history.column("sync/probe_rms_diff")[1]
    probe = summary.get("sync_probe_rms_diff", max(probes, default=None))
    if probe is not None:
        found.append(("largest sync probe difference (rms)", f"{probe:.1e}"))
    alarms = summary["alarms"] if "alarms" in summary else first_raised(row for _, row in history.steps)
    if alarms or history.names("alarm/", ""):
        found.append((f"alarms: {describe(alarms)}", str(len(alarms))))
    speeds = history.column("perf/rollout_tokens_per_second")[1]
    if speeds:
        found.append(("rollout tokens/s, median", f"{sorted(speeds)[len(speeds) // 2]:,.0f}"))
    return found


def _subtitle(history: History, versions: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    state = str(summary.get("status", "finished")) if summary else "not finished"
    names = [
        f"{name} {versions[name]}"
        for name in ("instep", "torch", "transformers", "megatron-core")
        if versions.get(name)
    ]
    commit = versions.get("git_commit")
    if commit:
        names.append(f"commit {str(commit)[:10]}{' with local changes' if versions.get('git_dirty') else ''}")
    return " \u00b7 ".join(
        [f"{state}, {len(history.steps)} rollout{'' if len(history.steps) == 1 else 's'} logged", *names]
    )


def _samples(rows: Iterable[dict[str, Any]], per_rollout: int = 2) -> list[dict[str, Any]]:
    """Return what is shown of a few samples from the first and the last rollout of each split."""
    splits: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        rollouts = splits.setdefault(row["split"], {})
        if row["rollout_id"] not in rollouts and len(rollouts) == 2:
            rollouts.popitem()
        chosen = rollouts.setdefault(row["rollout_id"], [])
        chosen += [row] if len(chosen) < per_rollout else []
    return [_sample(row) for rollouts in splits.values() for chosen in rollouts.values() for row in chosen]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, reward, label = row.get("prompt"), row.get("reward"), row.get("label")
    if isinstance(prompt, list):
        prompt = "\n".join(f"{m.get('role', '?')}: {_text(m.get('content'))}" for m in prompt)
    tone, head = "", f"reward {_text(reward)}"
    if isinstance(reward, (int, float)):
        tone, head = "good" if reward > 0 else "bad", f"reward {number(float(reward))}"
    tags = [f"{row['split']}, rollout {row['rollout_id']}", f"{row.get('response_length')} tokens"]
    if "loss" in row:  # of the data (SFT, DPO)
        head = f"{row.get('pair', '')} loss {number(row['loss'], 4)}".strip()
        tags = [tags[0], f"{row['num_tokens']} tokens, {row['num_trained']} trained on"]
    else:
        tags.append(str(row.get("status")))
    label = None if label is None or "pair" in row else _text(label)  # the label of a pair is the pair itself
    shown = {"prompt": _text(prompt), "response": _text(row.get("response")), "label": label}
    return {"tone": tone, "head": head, "tags": tags, **shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
