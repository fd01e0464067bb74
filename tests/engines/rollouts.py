"""What tests of the rollout side against a running embedded engine share: nothing between the two is faked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.source import RolloutDataSourceWithBuffer
from instep.engines.engine import Engine
from instep.engines.kind import kind_of
from instep.rollout.outputs import as_train_output
from instep.rollout.vllm_rollout import generate_rollout
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from instep.types import Sample
from tests import keys

NUM_PROMPTS = 24
calls: list[Any] = []  # what hooks have been called with


def start_engine(checkpoint: Path, folder: Path) -> Engine:
    port = free_port()
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(checkpoint), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    engine = Engine(
        "engine 0",
        keys.knowing(f"http://127.0.0.1:{port}"),
        SupervisedProcess("engine 0", command, folder / "log.txt", keys.ENVIRONMENT),
        kind_of("embedded"),
    )
    engine.wait_ready(120)
    return engine


def source_of(args: Any) -> LedgeredDataSource:
    return LedgeredDataSource(RolloutDataSourceWithBuffer(args), Ledger())


def rollout(args: Any, source: LedgeredDataSource | None = None, rollout_id: int = 0) -> Any:
    """One rollout as the controller runs it: the ledger must balance, and nothing may be left over."""
    source = source or source_of(args)
    output = as_train_output(generate_rollout(args, rollout_id, source))
    source.ledger.consume(output.samples)
    source.ledger.check()
    assert source.ledger.num_outstanding == 0
    assert len(output.samples) == args.rollout_batch_size
    indices = [group[0].group_index for group in output.samples]
    assert indices == sorted(indices)
    return output


async def parity(args: Any, sample: Sample) -> float:
    """A reward that varies within a group of a random model."""
    return float(sum(sample.tokens[-sample.response_length :]) % 2)


def eos(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text())["eos_token_id"])


def check_log_probs(checkpoint: Path, samples: list[Sample]) -> None:
    """The engine's log-probs against transformers, token by token: they are aligned, and of these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for sample in samples:
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            all_log_probs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        want = all_log_probs.gather(1, ids[1:, None])[:, 0][-sample.response_length :]
        got = torch.tensor(sample.rollout_log_probs)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-4
