"""Puts the tables of `results/` into the documents, between their markers: python benchmarks/document.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table(*rows: list[str]) -> str:
    """Return a Markdown table, whose head is the first row."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def measured(found: dict[str, Any], more: str = "") -> str:
    v = found["versions"]
    where = f"{found['device']}{more}; Python {v['python']}, torch {v['torch']}, transformers {v['transformers']}"
    return f"Measured on {found['date']}: {where}."


def cpu_grpo() -> str:
    found = result("cpu-grpo")
    c = found["configuration"]
    rows = [["lengths", "framework", "seconds a step", "response tokens/s", "mean length", "seconds by part"]]
    for r in found["rows"]:
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in r["breakdown"].items())
        numbers = [f"{r['seconds_per_step']:.3f}", f"{r['response_tokens_per_second']:,.0f}"]
        name = "TRL" if r["framework"] == "trl" else "instep"
        rows.append([r["lengths"], name, *numbers, f"{r['response_length_mean']:.1f}", parts])
    ratios = [["instep over TRL (more than 1: instep is faster)", ""]]
    ratios += [[f"`{name}`", f"{value:.2f}"] for name, value in found["headline"].items()]
    steps, skipped = c["steps"], c["skipped_steps"]
    how = f"{c['repeats']} repeats, in turn; of each run's {steps} steps the first {skipped} do not count."
    return "\n\n".join([measured(found, f", {c['cores']} cores") + f" {how}", table(*rows), table(*ratios)])


def embedded_engine() -> str:
    found = result("embedded-engine-cpu")
    rows = [["workload", "engine, tokens/s", "generate, tokens/s", "engine over generate"]]
    for r in found["rows"]:
        numbers = [f"{r[key]:,.0f}" for key in ("engine_tokens_per_s", "generate_tokens_per_s")]
        rows.append([f"`{r['workload']}`", *numbers, f"{r['ratio']:.2f}"])
    return measured(found, f", {found['workload']['threads']} threads each") + "\n\n" + table(*rows)


def learning() -> str:
    found = result("learning-cpu")
    flags = found["workload"]["flags"]
    rows = [["algorithm", "flags", "before", "after", "seconds"]]
    for name, words in flags.items():
        mine = [row for row in found["rows"] if row["algorithm"] == name]
        cells = [", ".join(f"{row[key]:.3f}" for row in mine) for key in ("reward_before", "reward_after")]
        rows.append([name, f"`{words}`", *cells, ", ".join(f"{row['seconds']:.0f}" for row in mine)])
    w = found["workload"]
    how = f"; runs at a time: {w['jobs']}; threads of each engine and trainer: {w['threads']}"
    return measured(found, how) + "\n\n" + table(*rows)


def bf16_gap() -> str:
    rows = [["device, vLLM", "model", "syncs", "tokens", "mean gap after them", "loaded from disk", "ratio"]]
    for device in ("cuda", "cpu"):
        found = result(f"bf16-gap-{device}")
        h = found["headline"]
        gaps = [f"{h[key]:.2e}" for key in ("gap_mean_after_syncs", "gap_mean_loaded_from_disk")]
        where = f"{found['device'].partition(',')[0]}, {found['versions']['vllm']}"
        rows.append(
            [
                where,
                found["workload"]["model"],
                str(h["num_syncs"]),
                f"{h['num_tokens']:,}",
                *gaps,
                f"{h['gap_ratio']:.4f}",
            ]
        )
    return table(*rows)


def weight_sync() -> str:
    found = result("weight-sync-cpu")
    w = found["workload"]
    rows = [["precision", "way", "engine paused, seconds", "bytes sent", "probe on both sides, seconds"]]
    for r in found["rows"]:
        seconds = [f"{r[key]:.3f}" for key in ("transfer_s", "proof_s")]
        rows.append([r["precision"], f"`{r['way']}`", seconds[0], f"{r['bytes']:,}", seconds[1]])
    ratios = ", ".join(f"{name.partition('_')[0]} {ratio:.1f}" for name, ratio in found["headline"].items())
    how = f"{w['num_parameters'] / 1e9:.2f} B random weights, medians of {w['num_syncs']} syncs of each way"
    text = f"{measured(found)} {how}. `shm` over `single-copy`: {ratios}."
    return f"{text}\n\n{table(*rows)}"


SECTIONS: dict[str, list[Callable[[], str]]] = {
    "docs/benchmarks.md": [cpu_grpo, embedded_engine],
    "docs/algorithms.md": [learning],
    "docs/engines.md": [bf16_gap],
    "docs/weight-sync.md": [weight_sync],
}


def documented(path: str) -> str:
    """Return the document with fresh tables."""
    text = (ROOT / path).read_text()
    for make in SECTIONS[path]:
        name = make.__name__.replace("_", "-")
        begin, end = f"<!-- results: {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        assert end in rest, f"{path} lacks the markers of {name}"
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for document in SECTIONS:
        (ROOT / document).write_text(documented(document))
