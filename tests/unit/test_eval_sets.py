"""The rows of evaluation sets: a run keeps those that it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.controller.controller import Controller
from instep.data import index
from instep.rollout import runtime
from instep.rollout.eval import evaluate, read_sets
from instep.types import Sample, Status
from tests.assets import make_checkpoint, make_prompts


async def says_three(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens([3], [-1.0])
    return sample


def rows(args: Any) -> list[int]:
    return [sample.metadata["row"] for sample in evaluate(args, 0).data["e"]["samples"]]


@pytest.mark.parametrize("large", [False, True])
def test_a_run_keeps_its_sets_whatever_becomes_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    model, path = make_checkpoint(tmp_path / "hf", layers=1), make_prompts(tmp_path / "eval.jsonl", 3)
    if large:
        monkeypatch.setattr(index, "LARGE", {".jsonl": 0})
    words = f"--hf-checkpoint {model} --prompt-data {make_prompts(tmp_path / 'a.jsonl', 2)} --eval-interval 1 "
    words += f"--eval-prompt-data e {path} --input-key prompt --label-key label --rm-type random --no-hook-trial "
    words += "--actor-num-gpus-per-node 1 --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2 "
    words += f"--rollout-max-response-len 12 --custom-generate-function-path {__name__}.says_three "
    words += f"--run-dir {tmp_path / 'run'} --data-cache-path {tmp_path / 'cache'}"
    engines = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1, "rollout_engine_urls": []}
    args = parse(words.split()).view({**engines, "rollout_engine_kind": "vllm"})
    controller = Controller(parse(words.split()), title="")
    try:
        path.write_text(path.read_text()[:-9])  # a row is cut off
        assert rows(args) == [0, 1, 2]
        path.unlink()
        assert rows(args) == [0, 1, 2]
        make_prompts(path, 2)
        assert rows(args) == [0, 1, 2]
        read_sets(args)  # another run of a notebook
        assert rows(args) == [0, 1]
    finally:
        runtime.shutdown()
        controller._undo.close()
