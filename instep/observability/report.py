"""The report of a run: one self-contained report.html with headline figures, plots, samples and configuration."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.observability.alarms import describe
from instep.observability.figures import duration, number
from instep.observability.plots import PLOTS, History, read_history
from instep.observability.sinks import json_lines, read_json_lines
from instep.system.atomic import write_text

STYLE = """
:root { --ink: #27303f; --dim: #6b7686; --line: #e3e7ee; --accent: #2f6fed; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 12px; }
.dim { color: var(--dim); } header p { margin: 4px 0 24px; color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.card span { color: var(--dim); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
.plot { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
.plot img { width: 100%; display: block; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
.sample { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; overflow: hidden; }
.sample h3 { font-size: 13px; margin: 0 0 8px; font-weight: 600; display: flex; gap: 8px; flex-wrap: wrap; }
.tag { border-radius: 20px; padding: 1px 10px; background: #eef2f8; font-weight: 500; }
.tag.good { background: #dff5e8; color: #17653a; } .tag.bad { background: #fde8e4; color: #94301b; }
pre { margin: 0 0 8px; padding: 8px 12px; border-radius: 6px; background: #f5f7fa; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace;
  max-height: 320px; overflow: auto; }
pre.response { border-left: 3px solid var(--accent); }
table { border-collapse: collapse; width: 100%; background: #fff; font-size: 14px; }
td { border-bottom: 1px solid var(--line); padding: 4px 12px; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: var(--dim); width: 40%; } td:last-child { font-variant-numeric: tabular-nums; }
details { background: #fff; border: 1px solid var(--line); border-radius: 10px; margin: 10px 0; overflow: hidden; }
summary { padding: 10px 16px; cursor: pointer; font-weight: 600; }
"""


def make_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from config.json, metrics.jsonl, summary.json and samples.jsonl.

    Files that are missing, because the run was stopped early, are left out.
    """
    run_dir = Path(run_dir)
    config, summary = _read_json(run_dir / "config.json"), _read_json(run_dir / "summary.json")
    history = read_history(read_json_lines(run_dir / "metrics.jsonl"))
    samples = (row for _, row in json_lines(run_dir / "samples.jsonl"))  # in all they may be larger than memory
    plots = [svg for plot in PLOTS if (svg := plot(history)) is not None]
    title = str(config.get("title") or run_dir.resolve().name)
    versions = summary.get("versions") or config.get("versions") or {}
    parts = [
        f"<header><h1>{html.escape(title)}</h1><p>{html.escape(_subtitle(history, versions, summary))}</p></header>",
        _cards(headline(history, summary)),
        _section("Plots", "plots", [f'<div class="plot">{_image(svg)}</div>' for svg in plots]),
        _section("Samples", "samples", _samples(samples)),
        "<h2>Details</h2>",
        _details("Summary", {k: v for k, v in summary.items() if k != "versions"}, opened=True),
        _details("Last step", history.steps[-1][1] if history.steps else {}),
        _details("Configuration", config.get("args") or {}),
        _details("Versions", versions, opened=True),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(p for p in parts if p)
        + "\n</main></body></html>\n"
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def headline(history: History, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that a reader looks for first, as far as they are known: `[(label, value)]`."""
    found: list[tuple[str, str]] = []
    before, after = summary.get("eval_reward_before"), summary.get("eval_reward_after")
    if before is not None or after is not None:
        sets = history.names("eval/", "/reward_mean") or ["eval/held-out/reward_mean"]  # the first is the summary's
        name = sets[0].removeprefix("eval/").removesuffix("/reward_mean")
        found.append((f"{name}: reward, before \u2192 after", f"{number(before)} \u2192 {number(after)}"))
    else:
        for name in history.names("eval/", "/reward_mean"):
            values = history.column(name)[1]
            if values:
                label = f"eval {name.removeprefix('eval/').removesuffix('/reward_mean')}, first \u2192 last"
                found.append((label, f"{number(values[0])} \u2192 {number(values[-1])}"))
    rewards = history.column("rollout/reward_mean")[1]
    if rewards:
        found.append(("training reward, first \u2192 last", f"{number(rewards[0])} \u2192 {number(rewards[-1])}"))
    losses = history.column("train/loss")[1]
    if losses and not rewards:
        found.append(("loss, first \u2192 last", f"{number(losses[0], 4)} \u2192 {number(losses[-1], 4)}"))
    for name in ("accuracy", "margin"):  # of pairs
        values = history.column(f"train/reward_{name}")[1]
        if values:
            found.append((f"{name}, first \u2192 last", f"{number(values[0])} \u2192 {number(values[-1])}"))
    masked = history.column("rollout/masked_ratio")[1]
    if masked and not rewards:
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
    alarms = raised_alarms(history, summary)
    if alarms or history.names("alarm/", ""):
        found.append((f"alarms: {describe(alarms)}", str(len(alarms))))
    speeds = history.column("perf/rollout_tokens_per_second")[1]
    if speeds:
        found.append(("rollout tokens/s, median", f"{sorted(speeds)[len(speeds) // 2]:,.0f}"))
    return found


def raised_alarms(history: History, summary: Mapping[str, Any]) -> dict[str, int]:
    """Return by name of the alarm the step at which it was raised first."""
    if "alarms" in summary:
        return summary["alarms"]
    names = history.names("alarm/", "")
    first = {n: [step for step, v in zip(*history.column(n), strict=True) if v == 1][:1] for n in names}
    return {n.removeprefix("alarm/"): int(steps[0]) for n, steps in first.items() if steps}


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


def _cards(figures: Sequence[tuple[str, str]]) -> str:
    cards = [f'<div class="card"><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>' for k, v in figures]
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _section(title: str, css: str, parts: Sequence[str]) -> str:
    return f'<h2>{title}</h2><div class="{css}">{"".join(parts)}</div>' if parts else ""


def _image(svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="plot" src="data:image/svg+xml;base64,{data}">'


def _samples(rows: Iterable[dict[str, Any]], per_rollout: int = 2) -> list[str]:
    """Return the cards of a few samples from the first and the last rollout of each split."""
    splits: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        rollouts = splits.setdefault(row["split"], {})
        if row["rollout_id"] not in rollouts and len(rollouts) == 2:
            rollouts.popitem()
        chosen = rollouts.setdefault(row["rollout_id"], [])
        chosen += [row] if len(chosen) < per_rollout else []
    return [_sample(row) for rollouts in splits.values() for chosen in rollouts.values() for row in chosen]


def _sample(row: Mapping[str, Any]) -> str:
    prompt, reward = row.get("prompt"), row.get("reward")
    if isinstance(prompt, list):
        prompt = "\n".join(f"{m.get('role', '?')}: {_text(m.get('content'))}" for m in prompt)
    tone, head = "", f"reward {_text(reward)}"
    if isinstance(reward, (int, float)):
        tone, head = " good" if reward > 0 else " bad", f"reward {number(float(reward))}"
    tags = [f"{row['split']}, rollout {row['rollout_id']}", f"{row.get('response_length')} tokens"]
    if "loss" in row:  # of the data (SFT, DPO)
        head = f"{row.get('pair', '')} loss {number(row['loss'], 4)}".strip()
        tags = [tags[0], f"{row['num_tokens']} tokens, {row['num_trained']} trained on"]
    else:
        tags.append(str(row.get("status")))
    tags_html = "".join(f'<span class="tag">{html.escape(tag)}</span>' for tag in tags)
    known = row.get("label") is not None and "pair" not in row  # the label of a pair is the pair itself
    label = f'<div class="dim">label: {html.escape(_text(row["label"]))}</div>' if known else ""
    return (
        f'<div class="sample"><h3><span class="tag{tone}">{html.escape(head)}</span>{tags_html}</h3>'
        f'<pre>{html.escape(_text(prompt))}</pre><pre class="response">{html.escape(_text(row.get("response")))}</pre>'
        f"{label}</div>"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _details(title: str, values: Mapping[str, Any], *, opened: bool = False) -> str:
    if not values:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(_text(v))}</td></tr>" for k, v in values.items()
    )
    return f"<details{' open' if opened else ''}><summary>{title}</summary><table>{rows}</table></details>"
