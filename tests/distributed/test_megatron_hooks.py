"""The hooks inside the Megatron trainer: when they are called, and with what."""

import json
import os
from pathlib import Path

import pytest
import torch

from instep.arguments.parse import parse
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.training import lr_schedule
from tests.assets import make_checkpoint, make_prompts
from tests.distributed.test_critic import rollout

HOOKS = """
import json, os
from megatron.core import parallel_state
from examples import hooks  # those of docs/hooks.md

def note(*what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def provider(pre_process, post_process, vp_stage=None):
    model = hooks.freeze_first_layer(pre_process, post_process, vp_stage)
    assert not any(p.requires_grad for p in model.decoder.layers[0].parameters())
    note("provider", pre_process, post_process, vp_stage, type(model).__name__)
    return model

def init(args):
    hooks.megatron_started(args)
    note("init", args.num_rollout, parallel_state.get_data_parallel_world_size())

def log_probs(args, model, store_prefix):
    hooks.before_log_probs(args, model, store_prefix)
    note("log_probs", store_prefix, len(model), type(model[0]).__name__, model[0].training)

def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    hooks.before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)
    still = not any(p.main_grad.any() for p in model[0].parameters() if p.requires_grad)
    note("step", rollout_id, step_id, type(optimizer).__name__, still, opt_param_scheduler)
    if rollout_id == 7:
        raise ValueError("rollout 7 is not for me")
"""
FLAGS = "--input-key prompt --rm-type random --rollout-batch-size 2 --num-rollout 9 --n-samples-per-prompt 4 "
FLAGS += "--rollout-max-response-len 40 --num-steps-per-rollout 2 --lr 1e-3 --lr-decay-style constant --device cpu "
FLAGS += "--train-backend megatron --actor-num-gpus-per-node 1 --custom-megatron-init-path my_megatron.init "
FLAGS += "--custom-model-provider-path my_megatron.provider "
FLAGS += "--custom-megatron-before-log-prob-hook-path my_megatron.log_probs "
FLAGS += "--custom-megatron-before-train-step-hook-path my_megatron.step"


def test_when_they_are_called_and_with_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "hf", layers=1)
    make_prompts(tmp_path / "train.jsonl", 2)
    (tmp_path / "my_megatron.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    where = ["--hf-checkpoint", str(tmp_path / "hf"), "--prompt-data", str(tmp_path / "train.jsonl")]
    args = parse([*FLAGS.split(), *where, "--run-dir", str(tmp_path / "run")])
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NOTES": str(tmp_path / "notes"), "PYTHONPATH": paths}
    workers = WorkerGroup("actor", 1, tmp_path / "logs", env)
    try:
        layout = workers.call("setup", args, 0, 1, str(tmp_path / "rendezvous"), 1, timeout=180)
        workers.call("load_weights", tmp_path / "hf", timeout=60)
        workers.call("load_reference", tmp_path / "hf", timeout=60)
        actor, batch = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 9)), rollout()
        schedule = actor.plan(batch)
        actor.score(batch, schedule, ["log_probs", "ref_log_probs"])()
        batch.token_columns["advantages"] = torch.ones_like(batch.token_columns["returns"])
        batch.token_columns["rollout_log_probs"] = batch.token_columns["log_probs"]
        actor.train(batch, schedule, 0, rollout_id=5)()
        with pytest.raises(Exception, match="rollout 7 is not for me") as caught:
            actor.train(batch, schedule, 2, rollout_id=7)()
        assert "--custom-megatron-before-train-step-hook-path my_megatron.step" in str(caught.value)
    finally:
        workers.close()
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    step = ["ChainedOptimizer", True, None]
    assert notes == [
        ["init", 9, 1],
        ["provider", True, True, None, "PolicyModel"],  # of the policy
        ["provider", True, True, None, "PolicyModel"],  # of the reference
        ["log_probs", "", 1, "DistributedDataParallel", True],
        ["log_probs", "ref_", 1, "PolicyModel", True],
        *(["step", 5, n, *step] for n in range(2)),
        ["step", 7, 0, *step],
    ]
