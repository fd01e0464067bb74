"""One line of `instep doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass
class Check:
    """What was looked at, how it is, and what to do about it."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def worst(checks: list[Check]) -> Status:
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"
