"""A check of `instep doctor`: one line of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass
class Check:
    """What was looked at, its state in words, and what to do where that is not `ok`."""

    name: str
    status: Status
    text: str
    remedy: str = ""
