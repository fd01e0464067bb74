"""A checkpoint that Megatron itself has written gives its weights, and runs no code."""

from __future__ import annotations

import argparse
import io
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from instep.checkpoints.plain import trusting_no_code
from instep.errors import CheckpointError
from tests.distributed.megatron_runs import MODELS, export, make_backend, refusal


def save_and_load(_: int, root: Path) -> None:
    """One rank. What becomes of it goes to `root/result.pt`."""
    from instep.training.megatron import cpu_platform

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
    cpu_platform.install()  # before the first import of megatron.core
    from megatron.core.dist_checkpointing import ShardedObject, save

    backend, hf = make_backend(root, "one")
    backend.load_hf(hf)
    folder, extra = root / "foreign", io.BytesIO()
    folder.mkdir()
    torch.save({"recipe": "delayed", "amax_history": torch.ones(2)}, extra)  # as Transformer Engine has it
    state = {"model": backend.model.sharded_state_dict(), "te": ShardedObject("te._extra_state", extra, (1,), (0,))}
    common = {"args": argparse.Namespace(params_dtype=torch.float32, exit_signal=signal.SIGTERM), "iteration": 7}
    save({**state, **common}, str(folder))
    saved, (other, _) = export(backend), make_backend(root, "one")

    def load() -> None:
        with trusting_no_code(folder):
            other.load(folder, optimizer=False)

    load()
    index, read = (folder / ".metadata").read_bytes(), export(other)
    torch.save({"args": save_and_load}, folder / "common.pt")  # names a function
    torch.save({"index": index, "saved": saved, "read": read, "code": refusal(load)}, root / "result.pt")
    dist.destroy_process_group()


def test_a_checkpoint_of_megatron_is_read_and_its_code_is_not(tmp_path):
    AutoModelForCausalLM.from_config(MODELS["untied"], dtype=torch.float32).save_pretrained(tmp_path / "untied")
    mp.spawn(save_and_load, args=(tmp_path,))
    result = torch.load(tmp_path / "result.pt", weights_only=False)
    assert b"torch.distributed.checkpoint.planner" in result["index"]  # the plans of all ranks
    assert result["read"].keys() == result["saved"].keys()
    assert all(torch.equal(result["read"][name], weight) for name, weight in result["saved"].items())
    assert isinstance(result["code"], CheckpointError) and "what is no data" in result["code"].what
    assert "save_and_load" in result["code"].what
