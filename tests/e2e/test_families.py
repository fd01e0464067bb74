"""Families of models with real vLLM: each trains, and each way that carries weights brings them to a proven engine."""

import pytest
import torch

from instep.arguments import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.weight_sync import WeightSync
from instep.data.batch import build_batch
from instep.training import lr_schedule
from instep.types import Sample
from tests.assets import make_prompts
from tests.e2e.commands import grpo_arguments, on_vllm, sync_folder
from tests.families import FAMILIES, make_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def train_once(actor: RoleTrainer) -> None:
    """One optimizer step on two samples of different lengths, longer than the window of the families that have one."""
    done = Sample.Status.COMPLETED
    samples = [
        Sample(group_index=0, index=i, tokens=list(range(5, 5 + n)), response_length=n - 8, reward=1.0, status=done)
        for i, n in enumerate((44, 21))
    ]
    batch = build_batch([samples])
    size = int(batch.response_lengths.sum())
    batch.token_columns["advantages"] = torch.ones(size)
    batch.token_columns["loss_weights"] = torch.full((size,), 1 / size)
    metrics = actor.workers.call("train", batch, [[[0, 1]]], [1e-3], timeout=120)[0][0][0]
    assert metrics["grad_norm"] > 0 and not metrics["skipped_steps"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_is_proven_by_every_way(name, tmp_path):
    checkpoint = make_family(name, tmp_path / "hf")
    family = FAMILIES[name]
    if family.precision == "bf16" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's latent attention on a CPU needs AMX")
    make_prompts(tmp_path / "train.jsonl", 4)
    flags = [*on_vllm(), "--vllm-max-model-len", "128", "--precision", family.precision]
    args = parse(grpo_arguments(tmp_path, tmp_path / "run", *flags)[1:], "train").replace(device="cpu")
    workers = WorkerGroup("actor", 1, tmp_path / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=tmp_path / "logs")
    try:
        layout = workers.call("setup", args, 0, 1, str(tmp_path / "rendezvous"), 1, timeout=120)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(checkpoint)
        assert (actor.remark() == "") is family.packed
        engine.wait_ready(240)
        sync = WeightSync(args, actor, "shm", sync_folder(args), vocab_size=50, max_len=128)
        try:
            for way in ("shm", "disk", "nccl", "shm"):
                result = sync.run([engine], way)
                print(f"{name} {way}: version {result.version} proven, off by {result.probe_max_abs_diff:.1e}")
                assert result.probe_max_abs_diff <= result.tolerance <= (1.1e-4 if family.precision == "fp32" else 0.5)
                train_once(actor)
        finally:
            sync.close()
    finally:
        workers.close()
        engine.stop()
