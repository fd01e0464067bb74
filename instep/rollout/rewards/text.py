"""The built-in rewards that read text alone: answers in responses, and their comparison. It imports nothing heavy."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from fractions import Fraction
from typing import Any, NamedTuple

from instep.rollout.rewards.dapo import dapo

MAX_ALGEBRA_CHARS = 1000  # a longer answer is compared as text only
_NUMBER = re.compile(r"[-+]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})(/\d{1,40})?")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}")
_BRACE = re.compile(r"\\(?:boxed|fbox)\{|\{|\}")
_BOXES = ("\\boxed{", "\\fbox{")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` (or `\\fbox{...}`) whose braces close; None without one."""
    open_braces: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    first = min((at for at in map(text.find, _BOXES) if at >= 0), default=len(text))  # text before it does not matter
    for token in _BRACE.finditer(text, first):
        if token[0] != "}":
            open_braces.append((len(token[0]) > 1, token.end()))
        elif open_braces:
            boxed, start = open_braces.pop()
            if boxed and (best is None or start > best[0]):
                best = (start, token.start())
    return None if best is None else text[best[0] : best[1]].strip()


@functools.lru_cache(512)  # answers within a group are often equal and share their label
def normalize(answer: str) -> str:
    """Remove marks that do not change the meaning of an answer: spaces, dollars, `\\left`, `\\text`, ..."""
    out = answer.strip().strip("$").strip()
    out = _WRAPPED.sub(r"\1", out)
    for old, new in (("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\ ", ""), ("\\$", ""), ("\\%", "")):
        out = out.replace(old, new)
    out = out.replace("dfrac", "frac").replace("tfrac", "frac").replace("^\\circ", "").replace("^{\\circ}", "")
    out = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", out)
    out = re.sub(r"\s+", "", out)
    return out.rstrip(".%")


@functools.lru_cache(512)
def as_exact_number(text: str) -> Fraction | None:
    """Return a plain integer, decimal or fraction (`3/4`, `\\frac{3}{4}`) as an exact number."""
    text = _FRACTION.sub(r"\1\2/\3", text)
    if not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / Fraction(denominator or 1)


def quick_equal(answer: str, label: str) -> bool | None:
    """Return whether two answers are equal as text or as exact numbers; None if only algebra can decide."""
    a, b = normalize(answer), normalize(label)
    if a == b:
        return bool(a)
    x, y = as_exact_number(a), as_exact_number(b)
    if x is not None and y is not None:
        return x == y
    return False if not a or not b else None


def after_thinking(response: str) -> str | None:
    """Return the text after `</think>` or `###Response` (the deepscaler format); None without either."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return response.rsplit(mark, 1)[1]
    return None


def exact(response: str, label: Any) -> float:
    """Return 1.0 if the response, after its thinking, equals one of the labels; several blanks count as one space."""
    said = " ".join((after_thinking(response) or response).split())
    labels = label if isinstance(label, list) else [label]
    return float(said in (" ".join(str(one).split()) for one in labels))


def f1(response: str, label: Any) -> float:
    """Return the token F1 as in HotpotQA's evaluation (arXiv:1809.09600), the best over the labels.

    Text is compared in lower case, without punctuation and articles. `yes`, `no` and `noanswer` are right only as a
    whole. Without a common word the result is 0, even where the right answer is empty.
    """
    labels, said = label if isinstance(label, list) else [label], _words(response)
    return max((_f1(said, _words(str(x))) for x in labels), default=0.0)


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(?:a|an|the)\b", " ", text).split()


def _f1(prediction: list[str], truth: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(truth)).values())
    whole = any(words in (["yes"], ["no"], ["noanswer"]) for words in (prediction, truth))
    if not common or (whole and prediction != truth):
        return 0.0
    precision, recall = common / len(prediction), common / len(truth)
    return 2 * precision * recall / (precision + recall)


def gpqa(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """Grade multiple choice: the last letter that is boxed, or follows "answer", or is alone on the last line.

    `label` is a letter, or the text of an option in `metadata["choices"]` (a list, or a dict by letter).
    """
    text = after_thinking(response) or response
    choices = metadata.get("choices") or []
    options = choices if isinstance(choices, dict) else dict(zip(string.ascii_uppercase, choices, strict=False))
    wanted = str(metadata.get("correct_letter") or label).strip()
    if len(wanted) != 1:
        wanted = next((k for k, v in options.items() if normalize(str(v)) == normalize(wanted)), wanted)
    boxed = last_boxed(text)
    if boxed is not None and (found := re.fullmatch(r"\(?([A-Za-z])\)?\.?", normalize(boxed))):
        return float(found[1].upper() == wanted.upper())
    letter = r"\(?\*{0,2}\(?([A-Z])\)?(?![A-Za-z'])"
    stated = re.findall(rf"(?i:answer|option|choice)\s{{0,3}}(?i:is|:)?\s{{0,3}}{letter}", text)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    alone = re.fullmatch(rf"{letter}\*{{0,2}}\.?", lines[-1]) if lines else None
    if stated or alone:
        return float((stated[-1] if stated else alone[1]).upper() == wanted.upper())  # type: ignore[index]
    said = boxed if boxed is not None else (lines[-1] if lines else "")
    return float(bool(options) and normalize(said).lower() == normalize(str(options.get(wanted, ""))).lower() != "")


class Algebra(NamedTuple):
    """A question that text alone does not decide: whether `answer` equals one of `labels` as mathematics."""

    answer: str
    labels: list[str]


def grade(name: str, response: str, label: Any, metadata: dict[str, Any]) -> float | dict[str, Any] | Algebra:
    """Grade a response by the rule that `--rm-type` calls `name`, in time linear in the length of the response."""
    if name.startswith("boxed_"):
        name, response = name.removeprefix("boxed_"), last_boxed(response) or ""
    if name == "exact_match":
        return exact(response, label)
    if name == "f1":
        return f1(response, label)
    if name == "gpqa":
        return gpqa(response, label, metadata)
    if name == "dapo":
        return dapo(response, label)
    if name == "deepscaler":
        response = after_thinking(response) or ""
    return _math(last_boxed(response), label)


def _math(answer: str | None, label: Any) -> float | Algebra:
    """Return 1.0 if the boxed answer equals the label (or one of several), else 0.0."""
    if answer is None:
        return 0.0
    hard = []
    for one in map(str, label if isinstance(label, list) else [label]):
        one = last_boxed(one) or one
        equal = quick_equal(answer, one)
        if equal:
            return 1.0
        if equal is None and max(len(answer), len(one)) <= MAX_ALGEBRA_CHARS:
            hard.append(one)
    return Algebra(answer, hard) if hard else 0.0
