"""The report of a run: one self-contained report.html with headline figures, plots, samples and configuration."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from instep.observability.alarms import Limits, advice, describe, first_raised
from instep.observability.figures import duration, number
from instep.observability.plots import PLOTS, History, read_history
from instep.observability.sinks import json_lines, read_json, read_json_lines
from instep.system.atomic import write_text

TEMPLATE = Path(__file__).with_name("report.jinja")
STYLE = Path(__file__).with_name("style.css")
IN_NOTEBOOK = ("reward", "loss", "length", "gap", "entropy", "phases")  # drawn again at every update


def make_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from config.json, metrics.jsonl, summary.json and samples.jsonl.

    Missing files are left out, for example those of a run that stopped early.
    """
    run_dir = Path(run_dir)
    config, summary = read_json(run_dir / "config.json"), read_json(run_dir / "summary.json")
    history = read_history(read_json_lines(run_dir / "metrics.jsonl"))
    samples = (row for _, row in json_lines(run_dir / "samples.jsonl"))  # all of them may not fit into memory
    plots = [svg for plot in PLOTS.values() if (svg := plot(history)) is not None]
    versions = summary.get("versions") or config.get("versions") or {}
    pages = jinja2.Environment(autoescape=True, keep_trailing_newline=True)
    pages.filters["text"] = _text
    page = pages.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=str(config.get("title") or run_dir.resolve().name),
        subtitle=_subtitle(history, versions, summary),
        style=STYLE.read_text(encoding="utf-8"),
        figures=headline(history, summary),
        alarms=advice([row for _, row in history.steps], Limits.from_args(config.get("args") or {})),
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


def fragment(run_dir: Path) -> str:
    """Return figures and curves of a run as they are now, as HTML for a notebook."""
    config, summary = read_json(run_dir / "config.json"), read_json(run_dir / "summary.json")
    history = read_history(read_json_lines(run_dir / "metrics.jsonl"))
    drawn = [svg for name in IN_NOTEBOOK if name in PLOTS and (svg := PLOTS[name](history)) is not None]
    images = "".join(
        f'<img width="46%" alt="plot" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'
        for svg in drawn
    )
    texts = [str(config.get("title") or run_dir.name), _subtitle(history, {}, summary)]
    texts += [f"{label}: {value}" for label, value in headline(history, summary)[:3]]
    return f"<p>{' &middot; '.join(map(html.escape, texts))}</p>{images}"


def headline(history: History, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that a reader looks for first, if they are known: `[(label, value)]`."""
    before, after = summary.get("eval_reward_before"), summary.get("eval_reward_after")
    sets = {n.removeprefix("eval/").removesuffix("/reward_mean"): n for n in history.names("eval/", "/reward_mean")}
    found = [row for name, metric in sets.items() for row in _course(history, f"eval {name}", metric)]
    if before is not None or after is not None:
        name = next(iter(sets), "held-out")  # the summary uses the first set
        found = [(f"{name}: reward, before \u2192 after", f"{number(before)} \u2192 {number(after)}")]
    rewarded = _course(history, "training reward", "rollout/reward_mean")
    found += rewarded or _course(history, "loss", "train/loss", 4)
    for name in ("accuracy", "margin"):  # of pairs
        found += _course(history, name, f"train/reward_{name}")

    def values(name: str) -> list[float]:
        return history.column(name)[1]

    wall, steps = summary.get("wall_seconds"), sum(values("perf/step_seconds"))
    peak = summary.get("peak_pss_bytes") or max(values("perf/peak_pss_bytes") or values("perf/pss_bytes"), default=0)
    masked, gaps = values("rollout/masked_ratio"), values("train/log_prob_gap_mean")
    gap = f"{max(gaps):.1e}" if gaps else "not available" if history.names("train/log_prob_gap_mean") else ""
    probe = summary.get("sync_probe_rms_diff", max(values("sync/probe_rms_diff"), default=None))
    alarms = summary["alarms"] if "alarms" in summary else first_raised(row for _, row in history.steps)
    speeds = sorted(values("perf/rollout_tokens_per_second"))
    rest = [
        ("masked tokens (not trained on)", f"{fmean(masked):.0%}" if masked and not rewarded else ""),
        ("rollouts", f"{len(history.steps):,}" if history.steps else ""),
        ("optimizer steps", f"{summary['num_steps']:,}" if summary.get("num_steps") else ""),
        ("wall time" if wall else "time in steps", duration(wall or steps) if wall or steps else ""),
        ("peak memory (PSS)", f"{peak / 1e9:.2f} GB" if peak else ""),
        ("largest mean log-prob gap to the engine" if gaps else "log-prob gap to the engine", gap),
        ("largest sync probe difference (rms)", f"{probe:.1e}" if probe is not None else ""),
        (f"alarms: {describe(alarms)}", str(len(alarms)) if alarms or history.names("alarm/") else ""),
        ("rollout tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else ""),
    ]
    return [*found, *((label, text) for label, text in rest if text)]


def _course(history: History, label: str, name: str, digits: int = 3) -> list[tuple[str, str]]:
    if not (values := history.column(name)[1]):
        return []
    return [(f"{label}, first \u2192 last", f"{number(values[0], digits)} \u2192 {number(values[-1], digits)}")]


def _subtitle(history: History, versions: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    state = str(summary.get("status", "finished")) if summary else "not finished"
    names = [f"{state}, {len(history.steps)} rollout{'' if len(history.steps) == 1 else 's'} logged"]
    names += [f"{n} {versions[n]}" for n in ("instep", "torch", "transformers", "megatron-core") if versions.get(n)]
    if commit := versions.get("git_commit"):
        names.append(f"commit {str(commit)[:10]}{' with local changes' if versions.get('git_dirty') else ''}")
    return " \u00b7 ".join(names)


def _samples(rows: Iterable[dict[str, Any]], per_rollout: int = 2) -> list[dict[str, Any]]:
    """Return the shown fields of a few samples from the first and the last rollout of each split."""
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
    if "loss" in row:  # a sample of the data (SFT, DPO)
        head = f"{row.get('pair', '')} loss {number(row['loss'], 4)}".strip()
        tags = [tags[0], f"{row['num_tokens']} tokens, {row['num_trained']} trained on"]
    else:
        tags.append(str(row.get("status")))
    label = None if label is None or "pair" in row else _text(label)  # the label of a pair is the pair itself
    shown = {"prompt": _text(prompt), "response": _text(row.get("response")), "label": label}
    return {"tone": tone, "head": head, "tags": tags, **shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
