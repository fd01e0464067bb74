"""DAPO's grader: the integer in the last `Answer:` line. This module imports nothing heavy.

The answer is brought into the normal form of Minerva's evaluation (Lewkowycz et al., arXiv:2206.14858, appendix on
MATH). slime (`rm_hub`) and verl (`math_dapo`) compare the same form. It is compared as text: `42.0`, `3.` and `50%` are
not the integers 42, 3 and 50.
"""

from __future__ import annotations

import re
from typing import Any

TAIL_CHARS = 300  # only the end of a response is read
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# In this order, each everywhere in the text: first `old -> new`, then words that are dropped. A `_` means a space.
_CHANGED = r"an_-> a_-> .$->$ \$-> \_-> _-> mbox->text ,\text{and}->, \text{and}->, \text{m}->\text{}"
_DROPPED = r"""
    square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples \text{s} \text{.} \text{^s} \text{}^2 \text{}^3
    \text{^} \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots <|im_end|> <|endoftext|>
"""
_REPLACED = [
    *((old.replace("_", " "), new) for old, _, new in (rule.partition("->") for rule in _CHANGED.split())),
    # `^` inside of \text{} means a line break
    *((re.sub(r"^\\text\{\^", r"\\text{\n", word), "") for word in _DROPPED.split()),
]
_REWRITTEN = [
    (re.compile(r"(?m)^.*?\$(.*?)\$.*"), r"$\1$"),  # the first formula between dollars of a line; `^` keeps it linear
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
]


def normal_form(answer: str) -> str:
    """Return the answer without its left-hand side, units, text and dollars; an integer has no commas."""
    out = answer.rsplit("=", 1)[-1]
    for old, new in _REPLACED:
        out = out.replace(old, new)
    for pattern, new in _REWRITTEN:
        out = pattern.sub(new, out)
    out = out.replace("$", "")
    plain = out.replace(",", "")
    return (plain if plain.isdigit() else out).strip()


def dapo(response: str, label: Any) -> dict[str, Any]:
    """Grade the last `Answer:` line of the last 300 characters; `score` is +1 or -1 (arXiv:2503.14476, eq. 7).

    A label such as `42.0` is the integer 42. A label that is not an integer is compared by its normal form, as in verl
    (slime cuts it to an integer, or raises).
    """
    lines = _LINE.findall(response[-TAIL_CHARS:])
    pred = normal_form(lines[-1]) if lines else "[INVALID]"
    wanted = normal_form(str(label))
    try:
        number = float(wanted)
        wanted = str(int(number)) if number.is_integer() else wanted
    except (ValueError, OverflowError):
        pass
    right = bool(pred) and pred == wanted
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
