"""`instep samples`: what is picked, in which order, and how masks, gaps and versions look."""

import io
import json

import pytest
from rich.console import Console

from instep.errors import ConfigError
from instep.observability.samples import MAX_LOGGED_TOKENS, gaps, sample_row
from instep.observability.show_samples import main
from instep.types import Sample, Status, VersionSpan
from tests.logged_run import make_groups
from tests.logged_run import run as logged_run


def make_sample(index, reward, mask=(1, 1, 1), n=3, **more):
    return Sample(
        group_index=index // 2,
        index=index,
        prompt=[{"role": "user", "content": "1+1?"}],
        tokens=[7, 8, *range(n)],
        response="abc",
        response_length=n,
        reward=reward,
        label="2",
        loss_mask=list(mask),
        rollout_log_probs=[-1.0] * n,
        status=Status.COMPLETED,
        weight_versions=[VersionSpan("3", 0, 1), VersionSpan("4", 1, n)],
        **more,
    )


def texts(ids):
    return [chr(97 + i) for i in ids]


@pytest.fixture
def run(tmp_path):
    rows = [(0, "train", make_sample(0, 0.25), [-1.0, -1.0, -1.0])]
    rows += [(1, "train", make_sample(1, 1.0), [-1.0, -1.5, -1.0]), (1, "train", make_sample(2, 0.0), None)]
    rows += [(1, "train", make_sample(3, 0.5, mask=[1, 0, 1]), [-1.0, -9.0, -1.001])]
    rows += [(1, "eval/held-out", make_sample(0, 0.75), None)]
    with open(tmp_path / "samples.jsonl", "w") as file:
        for rollout_id, split, sample, ours in rows:
            row = {"rollout_id": rollout_id, "split": split, **sample_row(sample, texts, ours)}
            file.write(json.dumps(row) + "\n")
    return tmp_path


def shown(*words, terminal=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=200)
    assert main([str(w) for w in words], console) == 0
    return out.getvalue()


def heads(text):
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("== ")]


def test_filters(run):
    assert heads(shown(run)) == [1, 2, 3]  # the last step
    assert heads(shown(run, "--step", 0)) == [0]
    assert heads(shown(run, "--worst", "reward")) == [2, 3, 1]
    assert heads(shown(run, "--worst", "gap")) == [1, 3, 2]  # sample 3's large difference is masked, 2's is unknown
    assert heads(shown(run, "--index", 0)) == [0]
    assert heads(shown(run, "--split", "eval/held-out")) == [0]
    limited = shown(run, "--limit", 1)
    assert heads(limited) == [1] and "1 of 3 samples" in limited


@pytest.mark.parametrize(
    "flag,value", [("--limit", "0"), ("--limit", "1e20"), ("--step", "-1"), ("--index", "9" * 5000)]
)
def test_numbers_have_a_range(run, flag, value):
    with pytest.raises(ConfigError, match=f"argument {flag}: .* (must be at least|is not a whole number)"):
        shown(run, flag, value)


def test_the_worst_of_rewards_that_are_dicts(tmp_path):
    with open(tmp_path / "samples.jsonl", "w") as file:
        for i, score in enumerate((0.5, 1.0, 0.0)):
            row = sample_row(make_sample(i, {"score": score, "other": -score}), texts)
            file.write(json.dumps({"rollout_id": 0, "split": "train", **row}) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"args": {"reward_key": "score"}}))
    assert heads(shown(tmp_path, "--worst", "reward")) == [2, 0, 1]


def test_the_view_says_how_many_there_were(tmp_path):
    groups = make_groups(32, 8)
    worst = min((s for group in groups for s in group), key=lambda s: s.reward)
    with logged_run(tmp_path) as log:
        log.samples(3, groups, "train", 8)
    seen = shown(tmp_path, "--worst", "reward", "--limit", 2)
    assert heads(seen)[0] == worst.index and worst.index not in [g[0].index for g in groups[:8]]
    extremes = "the lowest and highest reward and the longest are among them"
    assert f"2 shown of 10 logged of 256 in rollout 3 ({extremes}); --limit shows more" in seen
    with logged_run(tmp_path) as log:
        log.samples(3, make_groups(1, 2), "train", 8)
    assert "2 shown of 2 logged of 2 in rollout 3\n" in shown(tmp_path)


def test_what_is_not_there_is_an_error_that_says_what_is(run, tmp_path):
    for words, remedy in (
        (["--step", 7], "0 to 1"),
        (["--split", "eval/x"], "train, eval/held-out"),
        (["--index", 99], "1, 2, 3"),
    ):
        with pytest.raises(ConfigError, match="no sample") as error:
            shown(run, *words)
        assert remedy in error.value.remedy
    with pytest.raises(ConfigError, match="no such folder"):
        shown(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="invalid choice"):
        shown(run, "--worst", "colour")


def test_masks_gaps_and_versions_as_plain_text(run):
    one = shown(run, "--index", 3)
    assert "response  a[masked: b]c" in one and "\x1b" not in one
    assert "reward 0.500  label 2" in one and "versions 3 [0:1], 4 [1:3]" in one
    assert "gap mean 5.0e-04, max 1.0e-03" in one and 'largest gaps  #2 "c" 1.0e-03' in one
    assert "user: 1+1?" in one
    assert "gap not available" in shown(run, "--index", 2)


def test_masks_and_gaps_by_colour_on_a_terminal(run):
    one = shown(run, "--index", 3, terminal=True)
    assert "[masked" not in one and "\x1b[2;9mb" in one  # dim and struck out
    assert "\x1b[1;31mb" in shown(run, "--index", 1, terminal=True)  # a gap of 0.5: bold red


def test_the_table_of_tokens(run):
    lines = shown(run, "--index", 3, "--tokens").splitlines()
    table = [line.split() for line in lines if line.strip()[:1].isdigit() and '"' in line]
    assert [row[:4] for row in table] == [["0", "0", '"a"', "1"], ["1", "1", '"b"', "0"], ["2", "2", '"c"', "1"]]
    assert [row[-1] for row in table] == ["3", "4", "4"]  # versions
    assert table[1][4:7] == ["n/a", "-9.0000", "n/a"]  # an engine's log-prob of a token it has not sampled is none


def test_rows_of_samples():
    row = sample_row(make_sample(0, 1.0, remove_sample=True), texts, [-1.0, float("nan"), -2.0])
    assert row["tokens"]["loss_mask"] == [0, 0, 0] and row["tokens"]["log_probs"] == [-1.0, None, -2.0]
    assert gaps(row) == [None, None, None]
    long = sample_row(make_sample(0, 1.0, mask=[1] * 5000, n=5000))
    assert len(long["tokens"]["ids"]) == MAX_LOGGED_TOKENS and long["response_length"] == 5000
    assert long["tokens"]["texts"] is None and long["tokens"]["log_probs"] is None
