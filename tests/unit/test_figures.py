"""What people are shown of SFT and DPO, which have neither rewards nor engines: their own figures, everywhere."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from instep.errors import ConfigError
from instep.observability.figures import SUMMARY, figures_of, legend_of
from instep.observability.progress import Progress
from instep.observability.show_samples import main as show
from instep.types import Sample, Status
from tests.logged_run import plain_console, run

OF_DATA = {"rollout/num_tokens": 900.0, "rollout/masked_ratio": 0.25, "train/grad_norm": 2.5}
OF_PAIRS = {"train/reward_accuracy": 0.75, "train/reward_margin": 0.125}
KINDS = {
    "sft_loss": ("loss 1.5000  tokens 900  masked 0.250  grad 2.500", OF_DATA),
    "dpo_loss": (
        "loss 1.5000  accuracy 0.750  margin 0.125  tokens 900  grad 2.500",
        {**OF_DATA, **OF_PAIRS},
    ),
}


def of_data(index: int, **more) -> Sample:
    sample = Sample(group_index=0, index=index, prompt=[{"role": "user", "content": "1+1?"}], tokens=[5, 6, 7, 8, 9])
    sample.response_length, sample.loss_mask, sample.reward, sample.status = 3, [1, 0, 1], 0.0, Status.COMPLETED
    sample.extra = more
    return sample


def texts(ids: list[int]) -> list[str]:
    return [chr(97 + i) for i in ids]


def logged(folder: Path, loss_type: str, console: Console) -> None:
    pair = {"sft_loss": [{}, {}], "dpo_loss": [{"pair": "chosen"}, {"pair": "rejected"}]}[loss_type]
    with run(folder, args_dict={"loss_type": loss_type}, console=console) as log:
        for step, loss in enumerate((3.0, 1.5)):
            log.log(step, {"train/loss": loss, **KINDS[loss_type][1]})
            group = [of_data(i, **more) for i, more in enumerate(pair)]
            log_probs = {id(s): [-loss, -9.0, -2 * loss] for s in group}
            log.samples(step, [group], "train", 8, rewarded=False, texts=texts, log_probs=log_probs)
        log.finish({"num_steps": 2, "num_tokens": 1800})


def test_every_number_is_explained() -> None:
    for loss in ("policy", "sft_loss", "dpo_loss"):
        for figure in figures_of({"loss_type": loss}):
            assert re.search(rf"\b{figure.label.split()[-1]}\b[\w, ]*: ", legend_of({"loss_type": loss})), figure
            assert not figure.in_table or f"{figure.key}_last" in SUMMARY


def test_notes_are_three_at_most(tmp_path: Path) -> None:
    console = plain_console()
    with run(tmp_path, console=console) as log:
        log.notes(["one", "two"])
        log.notes(["three", "four", "five"])
        log.finish({"model": "m"})
    lines = console.file.getvalue().splitlines()
    path = tmp_path / "logs" / "notes.txt"
    assert lines[1:5] == ["note: one", "note: two", "note: three", f"2 more notes: {path}"]
    assert path.read_text().split() == ["one", "two", "three", "four", "five"]
    assert lines[-1].endswith("instep serve --hf-checkpoint m (the model)")


@pytest.mark.parametrize("loss_type", KINDS)
def test_lines_and_table(tmp_path: Path, loss_type: str) -> None:
    console = plain_console()
    logged(tmp_path, loss_type, console)
    text = console.file.getvalue()
    line = next(line for line in text.splitlines() if "rollout 1 (2/4)" in line)
    assert KINDS[loss_type][0] in line
    assert "reward" not in text and "gap" not in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["loss_first"], summary["loss_last"], summary["num_tokens"]) == (3.0, 1.5, 1800)
    last = {"sft_loss": {"masked_last": 0.25}, "dpo_loss": {"accuracy_last": 0.75, "margin_last": 0.125}}[loss_type]
    assert last.items() <= summary.items()
    assert "loss_last" in text and "1.5000" in text


@pytest.mark.parametrize("loss_type", KINDS)
def test_samples_and_report(tmp_path: Path, loss_type: str) -> None:
    logged(tmp_path, loss_type, plain_console())
    out = io.StringIO()
    assert show([str(tmp_path), "--worst", "loss"], Console(file=out, width=200)) == 0
    first = out.getvalue()
    assert "loss 2.2500  tokens 5  masked 3 (60%)" in first  # (1.5 + 3.0) / 2; the prompt and one token are masked
    assert "response  h[masked: i]j" in first and not any(w in first for w in ("reward", "gap", "version", "label"))
    assert ("pair chosen" in first and "pair rejected" in first) == (loss_type == "dpo_loss")
    with pytest.raises(ConfigError, match="no reward") as caught:
        show([str(tmp_path), "--worst", "reward"], Console(file=out))
    assert "loss, gap and length" in caught.value.remedy
    page = (tmp_path / "report.html").read_text()
    assert "loss, first \u2192 last" in page and "loss 2.2500" in page and "5 tokens, 2 trained on" in page
    assert "3.0000 \u2192 1.5000" in page
    assert not re.search(r">[^<]*\b(reward|gap)\b", re.sub("(?s)<style.*?</style>", "", page).split("<h2>Details")[0])
    assert page.count("data:image/svg+xml;base64,") == {"sft_loss": 3, "dpo_loss": 4}[loss_type]


def test_the_panel_draws_the_first_figure(tmp_path: Path) -> None:
    logged(tmp_path, "dpo_loss", plain_console())
    for loss_type, first in (("sft_loss", "loss"), ("dpo_loss", "loss"), ("policy_loss", "reward")):
        with run(tmp_path / loss_type, args_dict={"loss_type": loss_type}) as log:
            for step, value in enumerate((3.0, 1.5)):
                log.log(step, {"train/loss": value, "rollout/reward_mean": value, "train/entropy": 0.5})
            rows = panel(log.progress)
        assert any(row.startswith(f"{first} ") and row.endswith("\u2588\u2581") and "1.5" in row for row in rows), rows
        assert any("2 of 4 rollouts done" in row for row in rows)
        assert any(row.startswith("loss ") for row in rows)
        assert (
            any(row.startswith("reward ") for row in rows) == (first == "reward") == any("entropy" in r for r in rows)
        )


def panel(progress: Progress) -> list[str]:
    """The rows of the panel on a terminal of 80 columns, without its frame."""
    out = io.StringIO()
    progress._blocks = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
    Console(file=out, width=80).print(progress.render())
    return [line.strip("\u2502 ") for line in out.getvalue().splitlines()]
