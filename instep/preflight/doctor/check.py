"""A check of `instep doctor`: one line of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "warn", "fail"]  # absent: not here, and not asked for


@dataclass
class Check:
    """The name of a check, the state in words, and what to do if it is not `ok`."""

    name: str
    status: Status
    text: str
    remedy: str = ""
