"""What `weight_sync_gpu.py` is to reach, and whether the rows of a device show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
NEAR = 0.05  # of a target that is to be met in both directions


def headline(rows: Sequence[Row], num_gpus: int) -> dict[str, dict[str, Any]]:
    """By figure its `target`, what was `measured` (None: the rows do not hold it), and whether that is `met`.

    Seconds are medians; a pause and a session are of syncs with no request in flight, a session without its proof.
    """
    of = {(row["size"], row["way"]): row for row in rows if "error" not in row}
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, sign: str, target: float, measured: float | None) -> None:
        near = measured is not None and abs(measured - target) <= NEAR * target
        met = {"<=": lambda m: m <= target, ">=": lambda m: m >= target, "~": lambda m: near}[sign]
        rounded = None if measured is None else float(f"{measured:.4g}")
        known = None if measured is None else bool(met(measured))
        found[name] = {"target": f"{sign} {target:g}", "measured": rounded, "met": known}

    for size, way in (
        [(size, way) for size in ("0.6b", "4b") for way in ("ipc", "single-copy")] if num_gpus == 1 else ()
    ):
        row = of.get((size, way), {})
        add(f"{size}_{way}_syncs_with_requests", ">=", 20, row.get("num_syncs"))
        if size == "0.6b":
            add(f"{size}_{way}_session_s", "<=", 0.1, _idle(row, "session_seconds"))
            add(f"{size}_{way}_pause_s", "<=", 0.06, _idle(row, "pause_seconds"))
        if way == "single-copy":
            add(f"{size}_{way}_write_over_floor", "<=", 2, _ratio(_busy(row, "write_seconds"), row.get("floor")))
            add(f"{size}_{way}_bytes", "<=", 0, _busy(row, "bytes"))
            models = _models_saved(of.get((size, "ipc"), {}), row)
            add(f"{size}_{way}_peak_below_ipc_in_bf16_models", "~", 1, models)
    if num_gpus == 1:
        lora = of.get(("4b", "lora"), {})
        add("4b_lora_pause_s", "<=", 0.05, _idle(lora, "pause_seconds"))
        add("4b_lora_tokens_per_s_of_those_without", ">=", 0.9, lora.get("of_without"))
    else:
        nccl = of.get(("4b", "nccl"), {})
        add("4b_nccl_transfer_s", "<=", 0.21, _idle(nccl, "transfer_seconds"))
        for size in ("4b", "8b"):
            row = of.get((size, "nccl"), {})
            add(f"{size}_nccl_over_broadcast", "<=", 3, _ratio(_idle(row, "transfer_seconds"), row.get("floor")))
        row = of.get(("0.6b", "single-copy-tp2"), {})
        add("0.6b_single-copy-tp2_bytes", "<=", 0, _busy(row, "bytes"))
        add("0.6b_single-copy-tp2_write_over_floor", "<=", 2, _ratio(_busy(row, "write_seconds"), row.get("floor")))
    return found


def _idle(row: Row, name: str) -> float | None:
    return row.get("idle", {}).get(name)


def _busy(row: Row, name: str) -> float | None:
    return row.get("busy", {}).get(name)


def _ratio(measured: float | None, floor: float | None) -> float | None:
    return measured / floor if measured is not None and floor else None


def _models_saved(ipc: Row, single: Row) -> float | None:
    """By how many bf16 models the trainer's peak is lower than with `ipc`."""
    if "trainer_peak_gb" not in ipc or "trainer_peak_gb" not in single:
        return None
    return (ipc["trainer_peak_gb"] - single["trainer_peak_gb"]) * 1e9 / (2 * single["num_parameters"])
