"""`instep samples`: show a run's samples in the terminal, or as plain text in a pipe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from instep.arguments.flag import COUNT, INDEX, Number
from instep.errors import ConfigError
from instep.observability.figures import number
from instep.observability.samples import gaps, reward_number
from instep.observability.sinks import read_json, read_json_lines
from instep.system.options import OptionParser

WARN, BAD = 0.02, 0.2  # nats
_WORST = ("reward", "loss", "gap", "length")  # the lowest reward, the largest loss or gap, the most tokens


def _within(kind: Number) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value: int = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:50]!r} {error}") from None
        return value

    return convert


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `instep samples`."""
    out = OptionParser("instep samples", description="Show the samples that a run has logged (--num-logged-samples).")
    out.add_argument("run", type=Path, metavar="RUN", help="the --run-dir of the run")
    out.add_argument(
        "--step", type=_within(INDEX), metavar="N", help="of rollout N (from 0); default: the last one logged"
    )
    out.add_argument(
        "--index", type=_within(INDEX), metavar="I", help="only sample number I (of any step without --step)"
    )
    out.add_argument("--split", metavar="NAME", help="train, or eval/NAME; default: train")
    out.add_argument(
        "--worst",
        choices=_WORST,
        help="lowest reward, largest loss (SFT, DPO), largest gap or longest first; default: in the order of the run",
    )
    out.add_argument("--limit", type=_within(COUNT), default=8, metavar="K", help="at most K samples; default: 8")
    out.add_argument("--tokens", action="store_true", help="a table of each sample's tokens, too")
    return out


def main(words: Sequence[str], console: Console | None = None) -> int:
    """Run the command, and return its exit code."""
    options = parser().parse_args(words)
    rows = select(options.run, step=options.step, split=options.split, index=options.index)
    if options.worst is not None:
        key = reward_key(options.run, rows[0]["split"])
        if options.worst in ("reward", "loss") and all(row.get(options.worst) is None for row in rows):
            what, other = f"these samples have no {options.worst}", "loss" if options.worst == "reward" else "reward"
            raise ConfigError(what, where=f"--worst {options.worst}", remedy=f"{other}, gap and length sort them")
        rows = sorted(rows, key=lambda row: _badness(row, options.worst, key), reverse=True)
    console = console or Console(soft_wrap=True)
    for row in rows[: options.limit]:
        for part in render(row, with_tokens=options.tokens, marks=not console.is_terminal):
            console.print(part, soft_wrap=isinstance(part, Text))
    console.print(Text(_count(rows, min(options.limit, len(rows)), options.index is not None), "dim"))
    return 0


def _count(rows: Sequence[dict[str, Any]], num_shown: int, one: bool) -> str:
    """Return a line with the number of samples, shown and in all."""
    of, more = rows[0].get("num_samples"), "" if num_shown == len(rows) else "; --limit shows more"
    if one or of is None:
        return f"{num_shown} of {len(rows)} samples{more}"
    extremes = "longest is" if rows[0].get("reward") is None else "lowest and highest reward and the longest are"
    which = "" if len(rows) == of else f" (the {extremes} among them)"
    return f"{num_shown} shown of {len(rows)} logged of {of} in rollout {rows[0]['rollout_id']}{which}{more}"


def select(
    run_dir: Path, *, step: int | None = None, split: str | None = None, index: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of `run_dir`/samples.jsonl of one split and one rollout (or one sample), in their order.

    Raises:
        ConfigError: there are no such rows; the error lists those that exist.
    """
    rows = read_json_lines(run_dir / "samples.jsonl")
    if not rows:
        what = "no samples are logged" if run_dir.is_dir() else "no such folder"
        raise ConfigError(what, where=str(run_dir / "samples.jsonl"), remedy="give the --run-dir of a run")
    splits = list(dict.fromkeys(row["split"] for row in rows))
    split = split or ("train" if "train" in splits else splits[0])
    rows = [row for row in rows if row["split"] == split]
    if not rows:
        raise ConfigError(f"no samples of split {split!r}", where=str(run_dir), remedy=f"there are {', '.join(splits)}")
    where, steps = f"{run_dir}, split {split}", list(dict.fromkeys(row["rollout_id"] for row in rows))
    if step is None and index is None:
        step = steps[-1]
    if step is not None:
        rows = [row for row in rows if row["rollout_id"] == step]
        if not rows:
            known = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
            raise ConfigError(f"no samples of rollout {step}", where=where, remedy=f"there are {known}")
    if index is not None:
        known = ", ".join(str(row["index"]) for row in rows[-8:])
        rows = [row for row in rows if row["index"] == index]
        if not rows:
            remedy = f"there are {known} and maybe others; --num-logged-samples logs more"
            raise ConfigError(f"no sample {index} is logged", where=where, remedy=remedy)
    return rows


def render(row: dict[str, Any], *, with_tokens: bool, marks: bool) -> Iterator[Text | Table]:
    """Yield one sample: its facts, prompt and response, and its tokens as a table.

    Args:
        marks: mark in the text what else only colors show: [masked: ...] around tokens that are not trained on.
    """
    differences = gaps(row)
    known = [g for g in differences if g is not None]
    yield Text(f"== {row['split']} {row['rollout_id']}, group {row['group_index']}, sample {row['index']}", "bold")
    facts = _facts_of_data(row) if "loss" in row else _facts(row, known)
    yield Text.assemble(*(part for name, text, style in facts for part in ((f"{name} ", "dim"), (text + "  ", style))))
    yield Text.assemble(("prompt    ", "dim"), _prompt(row.get("prompt")))
    yield Text.assemble(("response  ", "dim"), response(row, differences, marks=marks))
    if marks and known:
        yield Text(f"largest gaps  {_largest(row, differences)}")
    if with_tokens and row.get("tokens"):
        yield token_table(row, differences)
    yield Text()


def _facts(row: dict[str, Any], known: list[float]) -> list[tuple[str, str, str]]:
    """Return name, text and style of the facts about a sample of an engine; `known` are its gaps."""
    gap = f"mean {number(fmean(known), 4)}, max {number(max(known), 4)}" if known else "not available"
    return [
        ("reward", _plain(row.get("reward")), _reward_style(row.get("reward"))),
        ("label", _plain(row.get("label")), ""),
        ("status", str(row.get("status")), "yellow" if row.get("status") != "completed" else ""),
        ("tokens", str(row.get("response_length")), ""),
        ("gap", gap, _gap_style(max(known)) if known else "dim"),
        ("versions", _versions(row), ""),
    ]


def _facts_of_data(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the same for a sample of the data (SFT, DPO), which has neither reward nor gap."""
    num, trained = row["num_tokens"], row["num_trained"]
    pair = [("pair", row["pair"], "green" if row["pair"] == "chosen" else "red")] if "pair" in row else []
    masked = f"{num - trained} ({1 - trained / max(1, num):.0%})"
    return [*pair, ("loss", number(row["loss"], 4), ""), ("tokens", str(num), ""), ("masked", masked, "")]


def response(row: dict[str, Any], differences: Sequence[float | None], *, marks: bool) -> Text:
    """Return the response token by token: green, yellow or red by gap, dim if it is not trained on."""
    tokens = row.get("tokens") or {}
    texts, mask = tokens.get("texts"), tokens.get("loss_mask") or []
    if not texts:
        return Text(row.get("response") or "")
    out, masked = Text(), False
    for text, trained, gap in zip(texts, mask, differences, strict=True):
        if marks and masked == bool(trained):
            out.append("]" if masked else "[masked: ")
            masked = not masked
        out.append(text, _gap_style(gap) if trained else "dim strike")
    out.append("]" if marks and masked else "")
    if row["response_length"] > len(texts):
        out.append(f" ... (the first {len(texts)} tokens of {row['response_length']} are logged)", "dim")
    return out


def token_table(row: dict[str, Any], differences: Sequence[float | None]) -> Table:
    """Return a table with a line per token: number, id, text, mask, both log-probs, gap, version."""
    tokens = row["tokens"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("#", "id", "text", "mask", "engine", "trainer", "gap", "version"):
        table.add_column(name, justify="left" if name in ("text", "version") else "right", no_wrap=True)
    spans = row.get("version_spans") or []
    blank: list[Any] = [None] * len(tokens["ids"])
    columns = [tokens.get(name) or blank for name in ("texts", "rollout_log_probs", "log_probs")]
    for i, (token, text, engine, ours) in enumerate(zip(tokens["ids"], *columns, strict=True)):
        gap, trained = differences[i], tokens["loss_mask"][i]
        version = next((str(v) for v, start, end in spans if start <= i < end), "unknown")
        cells = (str(i), str(token), json.dumps(text, ensure_ascii=False) if text is not None else "-", str(trained))
        numbers = [number(v, 4) if v is not None else "n/a" for v in (engine if trained else None, ours, gap)]
        style = _gap_style(gap) if trained else "dim"
        table.add_row(*(Text(cell, style) for cell in (*cells, *numbers, version)))
    return table


def _largest(row: dict[str, Any], differences: Sequence[float | None], count: int = 3) -> str:
    tokens = row["tokens"]
    worst = sorted(((g, i) for i, g in enumerate(differences) if g is not None), reverse=True)[:count]
    texts = tokens.get("texts") or tokens["ids"]
    return ", ".join(f"#{i} {json.dumps(texts[i], ensure_ascii=False)} {number(g, 4)}" for g, i in worst)


def reward_key(run_dir: Path, split: str) -> str | None:
    """Return the entry to use where rewards are dicts, from the run's config.json."""
    args = read_json(run_dir / "config.json").get("args", {})
    key = args.get("reward_key")
    return key if split == "train" else args.get("eval_reward_key") or key


def _badness(row: dict[str, Any], by: str, key: str | None) -> float:
    """Return a number that is larger for worse samples; samples without it come last."""
    if by == "length":
        return float(row.get("response_length") or 0)
    if by == "gap":
        return max([g for g in gaps(row) if g is not None], default=-1.0)
    value = row.get("loss") if by == "loss" else reward_number(row.get("reward"), key)
    return float("-inf") if value is None else value if by == "loss" else -value


def _gap_style(gap: float | None) -> str:
    return "" if gap is None else "green" if gap < WARN else "yellow" if gap < BAD else "bold red"


def _reward_style(reward: Any) -> str:
    return "" if not isinstance(reward, (int, float)) else "green" if reward > 0 else "red"


def _versions(row: dict[str, Any]) -> str:
    spans = row.get("version_spans")
    if spans:
        return ", ".join(f"{v} [{start}:{end}]" if len(spans) > 1 else str(v) for v, start, end in spans)
    return ", ".join(map(str, row.get("weight_versions") or [])) or "unknown"


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{m.get('role', '?')}: {_plain(m.get('content'))}" for m in prompt)
    return str(prompt)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
