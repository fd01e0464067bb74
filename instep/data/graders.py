"""The names of the built-in rewards, and what each requires of a row's label."""

from __future__ import annotations

import math
from typing import Any

NEED_LABELS = ("math", "deepscaler", "dapo", "f1", "exact_match", "gpqa", "code")
GRADERS = (*NEED_LABELS, "random", "remote_rm")
_TAKE_LISTS = ("math", "deepscaler", "f1", "exact_match", "code")  # of answers; any of them is right


def grader_of(rm_type: str) -> str:
    """Return the reward of a name, which may begin with `boxed_`."""
    return rm_type.removeprefix("boxed_")


def wrong_label(rm_type: str, label: Any, metadata: dict[str, Any]) -> str:
    """Return why a label is useless to a built-in reward; empty if it is not."""
    rule = grader_of(rm_type)
    if rule not in NEED_LABELS or (rule == "gpqa" and metadata.get("correct_letter")):
        return ""
    if rule == "code" and isinstance(label, dict):
        whole = all(isinstance(label.get(n), list) for n in ("inputs", "outputs"))
        return "" if whole and 0 < len(label["inputs"]) == len(label["outputs"]) else "has no inputs with outputs"
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
