"""SGLang's drafters of multi-token prediction: how their weights come, and which requests they exclude."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from instep.system.ports import free_port
from instep_engine.place import GOLDEN
from instep_engine.sglang.drafter import check_request, count
from tests.drafting import NORM, SIZES, make_next, make_policy, save


def without(folder: Path, to: Path, *begins: str) -> Path:
    shutil.copytree(folder, to)
    save({n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(begins)}, to)
    return to


@pytest.mark.sglang
@pytest.mark.parametrize("name", SIZES)
def test_a_drafter_gets_its_weights_as_a_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    """On both ranks of an engine. SGLang itself has loaded those of the start."""
    root = tmp_path / f"{GOLDEN}1"
    root.mkdir(mode=0o700)
    start, layer = make_policy(name, root / "hf"), NORM[name].partition("norm")[0].removesuffix("shared_head.")
    other = make_next(name, start, root / "next")
    part, none = without(other, root / "part", NORM[name]), without(other, root / "none", layer)
    words = [str(free_port()), *map(str, (start, other, start, part, start, none))]
    command = [sys.executable, "-m", "tests.unit.drafter_of_sglang"]
    ranks = [subprocess.Popen([*command, str(r), *words], stdout=subprocess.PIPE, text=True) for r in range(2)]
    try:
        told = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)
    for first, after_other, after_start, after_part, again, after_none in told:
        assert after_other["refused"] is after_start["refused"] is after_none["refused"] is None
        assert f"drafters.0.model.{NORM[name].removeprefix(layer).removesuffix('.weight')}" in after_part["refused"]
        for which in ("model", "drafter"):
            assert all(after_other[which][n] != digest for n, digest in first[which].items())
            assert first[which] == after_start[which] == again[which]
        shared = {n for n in first["drafter"] if n in ("model.embed_tokens.weight", "lm_head.weight")}
        assert len(shared) == 2 and all(after_none["drafter"][n] == after_none["model"][n] for n in shared)
        assert after_none["model"] == after_other["model"]
        assert all(after_none["drafter"][n] == d for n, d in first["drafter"].items() if n not in shared)
    assert told[0][0]["drafter"] != told[1][0]["drafter"]


def request(more: dict[str, Any], processor: str | None = None) -> Any:
    return SimpleNamespace(sampling_params={"temperature": 0.8, "top_p": 0.9, **more}, custom_logit_processor=processor)


@pytest.mark.parametrize("more", [{"min_p": 0.1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3}])
def test_what_drafts_are_not_checked_against_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"SGLang does not apply {next(iter(more))} to each token"):
        check_request(request(more))
    with pytest.raises(ValueError, match="does not apply custom_logit_processor"):
        check_request(request({}, "a"))
    check_request(request({"repetition_penalty": 1.0, "min_p": 0, "frequency_penalty": None}))


def test_drafts_are_counted() -> None:
    manager = SimpleNamespace(instep=SimpleNamespace(drafted=0, taken=0))
    for about in ({"spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 4}, {}, {"spec_num_proposed_drafts": 2}):
        count(None, manager, about, None, 0)
    assert (manager.instep.drafted, manager.instep.taken) == (8, 4)
