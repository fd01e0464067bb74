"""The names of the built-in rewards, and what each needs of a row's label."""

from __future__ import annotations

import math
from typing import Any

GRADERS = ("math", "deepscaler", "dapo", "f1", "gpqa", "random", "remote_rm")
NEED_LABELS = ("math", "deepscaler", "dapo", "f1", "gpqa")
_TAKE_LISTS = ("math", "deepscaler", "f1")  # of answers, any of which is right


def grader_of(rm_type: str) -> str:
    """The reward behind a name, which `boxed_` may precede."""
    return rm_type.removeprefix("boxed_")


def wrong_label(rm_type: str, label: Any, metadata: dict[str, Any]) -> str:
    """What makes a label useless to a built-in reward; empty: nothing."""
    rule = grader_of(rm_type)
    if rule not in NEED_LABELS or (rule == "gpqa" and metadata.get("correct_letter")):
        return ""
    answers = label if isinstance(label, list) and rule in _TAKE_LISTS else [label]
    if not answers:
        return "is an empty list"
    for answer in answers:
        if not isinstance(answer, (str, int, float)):
            return f"holds {type(answer).__name__}, but {rm_type} compares texts and numbers"
        if isinstance(answer, float) and not math.isfinite(answer):
            return f"holds {answer}, which no answer equals"
        if rule != "f1" and not str(answer).strip():
            return "is empty, so that no answer is right"
    return ""
