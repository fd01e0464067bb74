"""Seeded random command lines and rows, with the values that break parsers; and a bound of the time of each."""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, flag_table

COMMANDS = ("train", "train", "train", "sft", "dpo", "serve", "plan")
NUMBERS = (
    "0 -1 1 2 3.7 1e20 -1e20 1e-320 1e308 1e400 nan inf 0x10 1_0 1e9 1000000 4294967296 99999999999999999999 1e10 -0.0 "
    "0.000001 \u0663 2k 9999999G 1.5.2"
).split() + ["9" * 5000, " ", "", "1 2"]
TEXTS = [
    "\udc80\udcff",
    "a" * 100_000,
    "{",
    "{}{}",
    "%s%n",
    "../..",
    "/etc/passwd",
    "/dev/null",
    "no/such/file.jsonl",
    "data.jsonl",
    "data.jsonl@[",
    "data.jsonl@[5:2]",
    "data.jsonl@[" + "9" * 5000 + ":]",
    "hf",
    "hf/config.json",
    "http://[",
    "http://h:99999999",
    "h:p",
    "json.dumps",
    "os",
    "tests.no.such",
    "\U0001f4a5",
    '{"a":' * 3000,
    '{"a": NaN}',
    '{"a": ' + "1" * 5000 + "}",
    "[1]",
    "null",
    "=",
    "math",
    "strange.yaml",
    "deep.yaml",
    "long.yaml",
]
# Files of the flags that name YAML.
YAML = {
    "strange.yaml": "eval: {datasets: [{name: 1, path: [], temperature: .nan, top_k: 1e30, stop: 3}]}\n"
    "vllm: [{name: a, server_groups: [{num_gpus: 100000000000000000000, worker_type: []}]}]\n"
    "megatron: [{role: [], overrides: 3}]\n",
    "deep.yaml": "[" * 2000,
    "long.yaml": "vllm: " + "1" * 5000,
}


def flags() -> list[Flag]:
    """All flags of instep and Megatron, those that act thrice, and one of ten of vLLM's and the router's."""
    own = list({f.name: f for f in (*own_flags().values(), *passed_through().values())}.values())
    acting = [f for f in own if f.status == "acts"]
    theirs = [
        Flag(PREFIXES[package] + f.name.removeprefix("--"))
        for package in PREFIXES
        for f in flag_table(package).flags[::10]
    ]
    return [*acting, *acting, *own, *theirs]


def values_of(flag: Flag) -> list[str]:
    """Values for a flag, strange ones and likely ones."""
    return [*NUMBERS, *map(str, flag.choices)] if flag.range else [*TEXTS, *map(str, flag.choices), *NUMBERS[:6]]


def words(rng: random.Random, known: list[Flag]) -> list[str]:
    """One to four flags with values, or with none, or with too many."""
    out = []
    for flag in rng.sample(known, rng.choice((1, 1, 1, 2, 4))):
        count = 0 if flag.is_switch else rng.choice((1, 1, 1, 1, 1, 0, 2))
        out += [flag.name, *(rng.choice(values_of(flag)) for _ in range(count))]
    return out


STRANGE: list[Any] = [
    *(None, True, 0, -1, 3, 1.5, "", " ", "x", "\x00", "\ud800", "a\udfffb", "\U0001f600", "a" * 20_000, "<|im_end|>"),
    *(
        float("nan"),
        float("inf"),
        -0.0,
        1e308,
        10**400,
        2**63,
        [],
        {},
        [[]],
        [None],
        {"": ""},
        ["a", 1],
        "NaN",
        "[]",
        "{",
    ),
    *({"role": "user"}, {"role": "user", "content": 3}, {"role": 5, "content": "x"}, [{"role": "user", "content": []}]),
    *({"type": "text"}, [{"type": "text", "text": 3}], {"rm_type": "math"}, {"rm_type": "maths"}, {"rm_type": 5}),
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1?", "label": "2", "metadata": {"rm_type": "math"}},
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": ["2", 2], "metadata": {"a": [1, {"b": 2}]}},
    {
        "prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "step_loss_mask": 1}],
        "label": 2,
    },
    {"prompt": "a", "label": "b", "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"prompt": "a", "label": "A", "metadata": {"rm_type": "gpqa", "choices": ["a", "b"]}, "tools": "[]"},
    {"prompt": "a", "label": 0.5, "chosen": "b", "rejected": "c"},
    {
        "chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "rejected": "z",
        "prompt": "x",
    },
]


def row(rng: random.Random) -> bytes:
    """A line of a data file: a row with strange values, or with strange text."""
    value = copy.deepcopy(rng.choice(ROWS))
    for _ in range(rng.choice((0, 1, 1, 2))):
        _replace(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7)
    kind = rng.random()
    if kind < 0.08:
        text = text.replace(rng.choice((":", ",", "}", '"')), rng.choice(("", "::", "]", "\t", "'")), 1)
    elif kind < 0.12:
        text = text.replace('"', rng.choice(('"\\ud83d', '"\\ude00', '"\\u0000')), rng.choice((1, 3)))
    elif kind < 0.18:
        levels = rng.choice((90, 102, 400, 900, 20_000))
        text = text[:-1] + ', "metadata": {"d": ' + "[" * levels + "]" * levels + "}}"
    elif kind < 0.22:
        text = text[:-1] + ', "label": ' + "1" * rng.choice((400, 4300, 4301, 50_000)) + "}"
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.05 and data:
        data[rng.randrange(len(data))] = rng.choice((0, 0xFF, 0x80, 0x7B, 0x22))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.04 else data).replace(b"\n", b" ")


def _replace(rng: random.Random, value: Any) -> None:
    """Put something strange in the place of a part of `value`."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and rng.random() < 0.6:
        _replace(rng, value[key])
    elif isinstance(value, dict) and rng.random() < 0.2:
        del value[key]
    else:
        value[key] = copy.deepcopy(rng.choice(STRANGE))


class TooSlow(BaseException):
    """No `except` of the code under test takes it."""


@contextmanager
def bounded(cpu_seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block when this process has computed for so long, however busy the machine is."""

    def expire(number: int, frame: Any) -> None:
        raise TooSlow(f"more than {cpu_seconds} s")

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
