"""Puts the tables of `results/` into the documents, between their markers: python benchmarks/document.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """A file of `results/`, and by the key `file` its path."""
    file = f"benchmarks/results/{name}.json"
    return {"file": file, **json.loads((ROOT / file).read_text())}


def table(*rows: list[str]) -> str:
    """Return a Markdown table, whose head is the first row."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def measured(found: dict[str, Any], more: str = "") -> str:
    v = found["versions"]
    where = f"{found['device']}{more}; Python {v['python']}, torch {v['torch']}, transformers {v['transformers']}"
    return f"Measured on {found['date']} (`{found['file']}`): {where}."


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


def gpu_grpo() -> str:
    """One table; the newest files first. A peer's cell of ratios is empty."""
    head = "file, date, GPU|run|seconds a step|samples/s|times as fast as|generate, train, sync, s"
    rows = [[*head.split("|"), "rollout, train: x the floor", "to the first rollout, s", "peak, GiB"]]
    names = [
        *RESULTS.glob("gpu-grpo-h200-*.json"),
        *(RESULTS / f"gpu-grpo-h100{n}.json" for n in ("", "-tuned", "-mixed")),
    ]
    files = [result(path.stem) for path in sorted(names)]
    for found in sorted(files, key=lambda found: found["date"], reverse=True):
        what = f"`{Path(found['file']).stem}`, {found['date']}, {found['device'].removeprefix('NVIDIA ')}"
        for r in found["rows"]:
            over = {key: value for key, value in found["headline"].items() if key.startswith(f"{r['name']}_over_")}
            ratios = ", ".join(f"**{value:.2f}** `{key.partition('_over_')[2]}`" for key, value in over.items())
            rows.append([what, *_gpu_grpo_row(r, ratios)])
            what = ""
    return table(*rows)


def _gpu_grpo_row(r: dict[str, Any], ratios: str) -> list[str]:
    name = f"`{r['name']}`" + (" (one step)" if len(r.get("steps_s", "ab")) == 1 else "")
    if any(part.startswith("turns/") for part in r.get("parts", ())) and not r["name"].endswith("turns"):
        name += " (turns)"
    if "error" in r:
        return [name, str(r["error"]), *[""] * 6]
    parts = [r.get("parts", {}).get(f"perf/{part}_seconds") for part in ("rollout", "train", "sync")]
    if "phases" in r:
        parts = [r["phases"][part] for part in ("generate", "train", "sync")]
    peak = r["parts"]["perf/gpu_peak_bytes"] / 2**30 if "parts" in r else r.get("peak_gib")
    cells = [f"{r['step_s']:.2f}", f"{r['samples_per_s']:.1f}", ratios]
    cells.append(", ".join(f"{s:.2f}" for s in parts) if all(parts) else "")
    cells.append(", ".join(f"{phase['factor']:.2f}" for phase in r.get("roofline", {}).values()))
    return [name, *cells, f"{r.get('start_s', '')}", f"{peak:.1f}" if peak else ""]


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
    return f"From `benchmarks/results/bf16-gap-cuda.json` and `bf16-gap-cpu.json`.\n\n{table(*rows)}"


def controller_share() -> str:
    """A table of every `results/controller-share-*.json`."""
    return "\n\n".join(_controller_share(path.stem) for path in sorted(RESULTS.glob("controller-share-*.json")))


def _controller_share(file: str) -> str:
    found = result(file)
    rows = [["part", *(f"{r['samples']:,}, {r['lengths']}" for r in found["rows"])]]
    names = {
        "cpu": "**all, CPU seconds**",
        "wall": "wall clock, with waits for stand-ins and other work",
        "beyond the engine": "**beyond the engine**",
    }
    for name in found["rows"][0]["seconds"]:
        if name != "generate wall":
            rows.append([names.get(name, name), *(f"{r['seconds'][name]:.3f}" for r in found["rows"])])
    rate = found["workload"].get("tokens_per_second")
    pace = f" The engine makes {rate:,.0f} tokens a second." if rate else ""
    host = f" {found['host']}" if "host" in found else ""
    return f"{measured(found, host)}{pace}\n\n{table(*rows)}"


def data_files() -> str:
    found = result("data-files-cpu")
    rows = [["file", "start", "seconds to the first batch", "seconds of a further batch", "memory, MB"]]
    names = {"first": "first, which builds the index", "second": "second", "cold": "third, nothing in the page cache"}
    for r in found["rows"]:
        file = (
            f"{r['kind']}, {r['file_gb']:.1f} GB (cache {r['cache_gb']:.2f} GB), {r['starts'][0]['prompts']:,} prompts"
        )
        for one in r["starts"]:
            figures = [f"{one[key]:.3f}" for key in ("to_first_batch_s", "batch_s")]
            rows.append([file, names[one["start"]], *figures, f"{one['memory_mb']:.0f}"])
    return f"{measured(found)} A batch has {found['workload']['batch']} prompts.\n\n{table(*rows)}"


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


def weight_sync_gpu() -> str:
    """The tables of every device in `results/weight-sync-<device>.json`, of which weight_sync_gpu.py writes one."""
    parts = []
    for path in sorted(RESULTS.glob("weight-sync-[0-9]x-*.json")):
        found = result(path.stem)
        gpus = f"{found['num_gpus']} x {found['device']}, copying {found['copy_gb_per_s']:,.0f} GB/s"
        if "broadcast_gb_per_s" in found:
            gpus += f", broadcasting {found['broadcast_gb_per_s']:,.0f} GB/s"
        head = "size, way|paused p50, p95|idle: paused, session, with proof|publish, floor|proof|recomputed|GB|tokens/s"
        rows = [head.split("|")]
        for r in found["rows"]:
            name = f"{r['size']} `{r['way']}`"
            rows.append([name, r["error"], *[""] * 6] if "error" in r else [name, *_sync_cells(r)])
        gpus += f", {found['host']}" if "host" in found else ""
        parts.append(f"{measured({**found, 'device': gpus})}\n\n{table(*rows)}")
        here = tuple(f"{r['size']}_{r['way']}_" for r in found["rows"])
        mine = {n: f for n, f in found["headline"].items() if n.startswith(here)}
        missed = [f"`{n}` {f['measured']} ({f['target']})" for n, f in mine.items() if f["met"] is False]
        met, unknown = (sum(f["met"] is value for f in mine.values()) for value in (True, None))
        parts.append(
            f"Targets: {met} met, {unknown} not measured, {len(missed)} missed{': ' * bool(missed)}{', '.join(missed)}."
        )
    return "\n\n".join(parts) or "Nothing measured yet."


def gpu_main() -> str:
    """The runs of `results/gpu-main.json`, put together from the tables of scripts/gpu_main.py."""
    found = result("gpu-main")
    head = (
        "job|GPU, what else ran|steps|session|pause|transfer|proof|rollout|train|sync|step|sleep, wake, offload, onload"
    )
    rows = [head.split("|")]
    for run in found["runs"]:
        beside = f"{run['beside']}; {run['date']}" if "date" in run else run["beside"]
        for r in run["rows"]:
            m = r["median"]
            sync = [_first_too(r, f"sync/{n}_seconds") for n in ("session", "pause", "transfer", "proof")]
            step = [_first_too(r, f"perf/{n}_seconds") for n in ("rollout", "train", "sync", "step")]
            names = [f"turns/{n}_seconds" for n in ("sleep", "wake", "offload", "onload")]
            turns = ", ".join(f"{m[n]:.2f}" for n in names) if names[0] in m else ""
            rows.append([f"`{r['job']}`", f"{run['device']}; {beside}", str(r["steps"]), *sync, *step, turns])
    v = found["versions"]
    text = f"Measured on {found['date']} (`{found['file']}`): vLLM {v['vllm']}, torch {v['torch']}. "
    text += "Seconds are medians over the steps but the first, whose seconds are in brackets."
    s = found["nccl_stream"]
    seconds, gb = median(s["syncs_s"]), s["bytes"] / 1e9
    stream = (
        f"`nccl` between {s['device']}, {gb:.2f} GB (4 B dimensions), gathered, packed, sent and checked, not loaded: "
    )
    stream += (
        f"{seconds:.3f} s (first {s['first_s']:.1f} s), {seconds / s['floor_s']:.2f} times what a 1-GiB broadcast's "
    )
    stream += f"rate needs; the sender's peak is {s['sender_peak_gib']:.1f} GiB, with the model."
    return f"{text}\n\n{table(*rows)}\n\n{stream}"


def async_training() -> str:
    """The tables of every `results/async-*.json`."""
    parts = []
    for path in sorted(RESULTS.glob("async-*.json")):
        found = result(path.stem)
        head = "|samples/s|rollout, s|trained in it, s|trainer waits, s|training, s|sync, s|staleness|held-out reward"
        rows = [head.split("|")]
        for mode in dict.fromkeys(row["mode"] for row in found["rows"]):
            mine = [row for row in found["rows"] if row["mode"] == mode and "error" not in row]
            names = "samples_per_s rollout_s early_train_s wait_s train_s sync_s staleness_mean held_out_reward".split()
            figures = [median(row.get(name, 0.0) for row in mine) if mine else 0.0 for name in names]
            rows.append([mode, *(f"{value:.2f}" if value else "" for value in figures)])
        h, num_seeds = found["headline"], len({row["seed"] for row in found["rows"]})
        text = f"Medians of {num_seeds} seeds." if num_seeds > 1 else "One seed."
        named = [("One step ahead", "one step ahead", "")]
        named += [(f"`--max-staleness {n}`", f"{n} versions", f"_{n}_versions") for n in (2, 4)]
        for name, mode, more in named:
            if f"samples_ratio{more}" in h:
                text += f" {name}: {h[f'samples_ratio{more}']:.2f} times the synchronous samples/s"
                num = num_seeds_of(found, mode)
                if f"share_of_bound{more}" in h:
                    text += f", {h[f'share_of_bound{more}']:.0%} of the bound {h[f'bound{more}']:.2f}"
                    text += " of one seed" if num_seeds_of(found, "in turns") == 1 < num else ""
                text += "." if num == num_seeds else f" ({num} of the seeds)."
        if "reward_difference" in h:
            text += f" The lowest held-out reward less the synchronous one's: {h['reward_difference']:+.3f}."
        parts.append(f"{measured(found)}\n\n{table(*rows)}\n\n{text}")
    return "\n\n".join(parts)


def num_seeds_of(found: dict[str, Any], mode: str) -> int:
    return len({row["seed"] for row in found["rows"] if row["mode"] == mode and "error" not in row})


def _first_too(row: dict[str, Any], name: str) -> str:
    now, first = row["median"][name], row["first"][name]
    return f"{now:.3f} ({first:.3f})" if row["steps"] > 1 else f"({first:.3f})"


def _sync_cells(r: dict[str, Any]) -> list[str]:
    def ms(*seconds: float | None) -> str:
        return ", ".join("-" if s is None else f"{s * 1e3:,.1f}" for s in seconds)

    busy = r["busy"]
    parts = ("gather", "meet", "send", "load", "write", "sample")
    sent = [busy[f"{n}_seconds"] for n in parts if f"{n}_seconds" in busy]
    published = ms(busy.get("publish"), r.get("floor")) + (f" ({ms(*sent)})" if sent else "")
    paused = [
        ms(r["paused_p50"], r["paused_p95"]),
        ms(*(r["idle"].get(n) for n in ("paused", "session_seconds", "session"))),
    ]
    memory = f"{r.get('gpu_gb', 0):.1f}, trainer {r['trainer_peak_gb']:.1f}"
    return [*paused, published, ms(busy.get("proof")), ms(r["recomputed"]), memory, f"{r['tokens_per_s']:,.0f}"]


def planned_seconds() -> str:
    from plan_seconds import PHASES, rows

    lines = [["what, on one GPU: seconds planned, and seen", *PHASES]]
    for row in rows():
        cells = [f"{row.planned[p]:.2f}, {row.seen[p]:.2f}" if p in row.seen else "" for p in PHASES]
        lines.append([f"`{row.name}`", *cells])
    return table(*lines)


def margins() -> str:
    found = json.loads((ROOT / "tests" / "distributed" / "margins.json").read_text())
    rows = [["model", "precision", "right", "wrong", "the smallest fault", "margin"]]
    for name, row in found.items():
        *model, precision = name.split(", ")
        fault, least = min(row["wrong"].items(), key=lambda item: item[1])
        wrong, margin = (f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in (least, least / row["right"]))
        rows.append([", ".join(model), precision, f"{row['right']:.2f}", wrong, fault, margin])
    return table(*rows)


def real_task() -> str:
    found = result("real-task-h200")
    head = "run|rollouts|reward at 1, 10, 20, 30, 40|seconds a step|mean gap|syncs|over rounding: median, largest"
    rows = [[*head.split("|"), "seconds of sync, proof"]]
    for r in found["rows"]:
        rewards = ", ".join(f"{value:.3f}" for value in r["reward"].values())
        ratio = r.get("probe_over_rounding")
        proof = [str(r["syncs"]), f"{ratio['median']:.2f}, {ratio['largest']:.2f}"] if ratio else ["", ""]
        seconds = f"{r['sync_s']:.2f}, {r['proof_s']:.2f}" if ratio else ""
        name = "TRL 1.16" if r["name"] == "trl" else f"`{r['name']}`"
        rows.append([name, str(r["rollouts"]), rewards, f"{r['step_s']:.2f}", f"{r['gap_mean']:.3f}", *proof, seconds])
    v = found["versions"]
    where = f"{found['host']}; vLLM {v['vllm']}, torch {v['torch']}, transformers {v['transformers']}"
    return f"Measured on {found['date']} (`{found['file']}`): {where}.\n\n{table(*rows)}"


SECTIONS: dict[str, list[Callable[[], str]]] = {
    "docs/benchmarks.md": [cpu_grpo, gpu_grpo, embedded_engine],
    "docs/algorithms.md": [learning],
    "docs/data.md": [data_files],
    "docs/lab/engines.md": [bf16_gap],
    "docs/weight-sync.md": [margins],
    "docs/lab/async.md": [async_training],
    "docs/lab/performance.md": [controller_share],
    "docs/lab/plan.md": [planned_seconds],
    "docs/lab/weight-sync.md": [real_task, weight_sync, weight_sync_gpu, gpu_main],
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
