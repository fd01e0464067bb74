"""PPO's critic in worker processes: the same values, losses, norms and weights in every layout, and plain torch's."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.arguments.roles import args_of_role
from instep.controller.role import RoleTrainer
from instep.data.batch import build_batch
from instep.errors import CheckpointError
from instep.training import lr_schedule
from instep.types import Sample
from tests.assets import make_checkpoint, make_prompts
from tests.distributed.helpers import started_workers
from tests.families import make_family

LR, NUM_STEPS, CLIP = 3e-3, 3, 0.05
LAYOUTS = {
    "hf": ("hf", 1, []),
    "hf FSDP2 x2": ("hf", 2, []),
    "megatron": ("megatron", 1, []),
    "megatron TP2": ("megatron", 2, ["--tensor-model-parallel-size", "2"]),
    "megatron TP2 SP": ("megatron", 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "megatron DP2": ("megatron", 2, ["--use-distributed-optimizer"]),
    "megatron PP2": ("megatron", 2, ["--pipeline-model-parallel-size", "2"]),
    "megatron CP2": ("megatron", 2, ["--context-parallel-size", "2"]),
    "megatron CP2 EP2": ("megatron", 2, ["--context-parallel-size", "2", "--expert-model-parallel-size", "2"]),
}


def rollout():
    """8 samples of uneven lengths, with tool tokens, returns far from 0, and loss weights."""
    rng = random.Random(11)
    samples = []
    for i in range(8):
        prompt, response = rng.randrange(3, 12), rng.randrange(2, 30)
        sample = Sample(group_index=i // 2, index=i, reward=float(i % 2), status=Sample.Status.COMPLETED)
        sample.tokens = [rng.randrange(4, 50) for _ in range(prompt)]
        sample.append_response_tokens([rng.randrange(4, 50) for _ in range(response)])
        sample.loss_mask = [1] + [int(rng.random() < 0.8) for _ in range(response - 1)]
        sample.sampling_params = {"temperature": 0.5}  # a critic has none
        samples.append(sample)
    batch = build_batch([samples])
    batch.token_columns["returns"] = torch.tensor([rng.gauss(2, 1) for _ in batch.token_columns["loss_mask"]])
    mask = batch.token_columns["loss_mask"]
    batch.token_columns["loss_weights"] = mask / mask.sum()
    return batch


class Critic:
    """The critic of one layout, as the controller has it."""

    def __init__(self, name, root, folder, precision="fp32"):
        backend, num_ranks, more = LAYOUTS[name]
        arguments = ["--hf-checkpoint", str(root / "hf"), "--prompt-data", str(root / "train.jsonl"), *more]
        arguments += [
            "--input-key",
            "prompt",
            "--rm-type",
            "math",
            "--label-key",
            "label",
            "--rollout-batch-size",
            "2",
            "--num-rollout",
            "9",
        ]
        arguments += ["--n-samples-per-prompt", "4", "--rollout-max-response-len", "40", "--micro-batch-size", "2"]
        arguments += ["--weight-decay", "0.05", "--adam-eps", "1e-4", "--lr-decay-style", "constant", "--device", "cpu"]
        arguments += ["--train-backend", backend, "--actor-num-gpus-per-node", str(num_ranks)]
        arguments += ["--advantage-estimator", "ppo", "--critic-lr", str(LR), "--value-clip", str(CLIP)]
        args = args_of_role(parse([*arguments, "--run-dir", str(folder)], "train"), "critic")
        self.args = args.replace(device="cpu", precision=precision)
        self.folder = folder
        self.workers = started_workers(self.args, "critic", num_ranks, folder / "logs")
        requests = [(self.args, rank, num_ranks, str(folder / "rendezvous"), 1, "critic") for rank in range(num_ranks)]
        layout = self.workers.call("setup", timeout=180, per_rank=requests)
        self.trainer = RoleTrainer(self.args, self.workers, layout, lr_schedule.from_args(self.args, 100))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.workers.close()

    def values(self, batch):
        self.trainer.score(batch, self.trainer.plan(batch), ["values"])()
        return batch.token_columns["values"]

    def steps(self, batch, count):
        """Values are scored anew before each second step, so that the clip acts in the others."""
        metrics = []
        for step in range(count):
            if step % 2 == 0:
                self.values(batch)
            metrics += self.trainer.train(batch, self.trainer.plan(batch), step)()[0]
        return metrics

    def weights(self):
        from safetensors.torch import load_file

        self.workers.call("export_hf", self.folder / "out", timeout=60)
        return load_file(self.folder / "out" / "model.safetensors")


def run_layout(name, root, folder):
    """First values, metrics of the steps, values and weights after them, and after a save and a load."""
    with Critic(name, root, folder) as critic:
        critic.workers.call("load_weights", root / "hf", True, timeout=60)
        batch = rollout()
        first = critic.values(batch)
        metrics = critic.steps(batch, NUM_STEPS)
        (folder / "saved").mkdir()
        critic.workers.call("save", folder / "saved", timeout=60)
        after, weights = critic.values(rollout()), critic.weights()
        critic.workers.call("load_weights", root / "hf", True, timeout=60)
        assert not critic.values(rollout()).any()
        critic.workers.call("load", folder / "saved", True, timeout=60)
        again = critic.values(rollout())
        assert torch.equal(again, after)
        return first, metrics, after, weights


def oracle(root):
    """Plain transformers, sample by sample, a linear head of zeros, torch's AdamW, one number after another."""
    model = AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float32, attn_implementation="eager")
    backbone = model.model
    head = torch.zeros(1, 64, requires_grad=True)
    named = {f"model.{n}": p for n, p in backbone.named_parameters()} | {"lm_head.weight": head}
    decay, rest = ([p for p in named.values() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-4)
    batch = rollout()

    def values():
        out = []
        samples = batch.tokens.split(batch.total_lengths.tolist())
        for tokens, response in zip(samples, batch.response_lengths.tolist(), strict=True):
            hidden = backbone(tokens[None]).last_hidden_state[0]
            out.append((hidden @ head[0])[-response - 1 : -1])
        return torch.cat(out)

    first, metrics, old = values().detach(), [], None
    for step in range(NUM_STEPS):
        now = values()
        old = now.detach() if step % 2 == 0 else old
        loss = now.new_zeros(())
        columns = zip(batch.token_columns["loss_weights"], now, old, batch.token_columns["returns"], strict=True)
        for weight, v, v_old, target in columns:
            bounded = v_old + (v - v_old).clamp(-CLIP, CLIP)
            loss = loss + weight * torch.maximum((v - target) ** 2, (bounded - target) ** 2)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics.append({"loss": float(loss.detach()), "grad_norm": float(norm)})
    return first, metrics, values().detach(), {n: p.detach() for n, p in named.items()}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp("critic")
    make_checkpoint(root / "hf")
    make_prompts(root / "train.jsonl", 16)
    return root, oracle(root)


FAST = [
    pytest.param(name, marks=pytest.mark.slow if name not in ("hf FSDP2 x2", "megatron TP2 SP") else ())
    for name in LAYOUTS
    if "EP" not in name
]


@pytest.mark.parametrize("name", FAST)
def test_values_and_steps_are_plain_torchs_in_every_layout(golden, tmp_path, name):
    root, (first, metrics, after, weights) = golden
    got_first, got_metrics, got_after, got_weights = run_layout(name, root, tmp_path)
    assert not first.any() and not got_first.any()
    assert metrics[0]["grad_norm"] > 1.0, "the gradient is to be clipped"
    for got, want in zip(got_metrics, metrics, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert got_metrics[1]["value_clipfrac"] > 0
    assert after.abs().mean() > 0.1
    torch.testing.assert_close(got_after, after, rtol=1e-5, atol=1e-5)
    assert got_weights.keys() == weights.keys()
    for key, want in weights.items():
        assert (got_weights[key] - want).norm() < 1e-5 * want.norm(), key


@pytest.mark.slow
def test_a_critic_with_experts_is_that_of_the_hf_backend(tmp_path):
    make_family("qwen3_moe", tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 16)
    results = []
    for name in ("hf", "megatron CP2 EP2"):
        (tmp_path / f"run {name}").mkdir()
        results.append(run_layout(name, tmp_path, tmp_path / f"run {name}")[1:])
    (metrics, after, weights), (got_metrics, got_after, got_weights) = results
    for got, want in zip(got_metrics, metrics, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert after.abs().mean() > 0.1
    torch.testing.assert_close(got_after, after, rtol=1e-5, atol=1e-5)
    assert got_weights.keys() == weights.keys()
    for key, want in weights.items():
        assert (got_weights[key] - want).norm() < 1e-5 * want.norm(), key


@pytest.mark.parametrize("name", ["hf FSDP2 x2", pytest.param("megatron TP2", marks=pytest.mark.slow)])
def test_a_critic_from_an_actors_checkpoint_has_its_transformer_and_a_new_head(golden, tmp_path, name):
    """An actor's folder gives all but the head; as a critic's own, it does not fit."""
    root, _ = golden
    _, num_ranks, _ = LAYOUTS[name]
    with Critic(name, root, tmp_path) as critic:
        actor = started_workers(critic.args, "actor", num_ranks, tmp_path / "logs")
        try:
            url = str(tmp_path / "rendezvous-actor")
            requests = [(critic.args, rank, num_ranks, url, 1) for rank in range(num_ranks)]
            actor.call("setup", timeout=180, per_rank=requests)
            actor.call("load_weights", root / "hf", timeout=60)
            (tmp_path / "actor").mkdir()
            actor.call("save", tmp_path / "actor", timeout=60)
        finally:
            actor.close()
        critic.workers.call("load_weights", tmp_path / "actor", True, timeout=60)
        weights = critic.weights()
        want = dict(AutoModelForCausalLM.from_pretrained(root / "hf").named_parameters())
        assert weights["lm_head.weight"].shape == (1, 64) and not weights["lm_head.weight"].any()
        assert all(torch.equal(weights[key], tensor) for key, tensor in want.items() if key in weights)
        assert len(weights) == len(want) + 1  # tied: the actor has no head of its own
        with pytest.raises(CheckpointError):
            critic.workers.call("load_weights", tmp_path / "actor", False, timeout=60)


@pytest.mark.parametrize("name", ["hf", pytest.param("megatron", marks=pytest.mark.slow)])
def test_bfloat16_is_near_and_values_are_not_rounded_to_it(golden, tmp_path, name):
    root, (_, metrics, after, _) = golden
    with Critic(name, root, tmp_path, "bf16") as critic:
        critic.workers.call("load_weights", root / "hf", True, timeout=60)
        got = critic.steps(rollout(), NUM_STEPS)
        values = critic.values(rollout())
    assert [m["loss"] for m in got] == pytest.approx([m["loss"] for m in metrics], rel=2e-2)
    assert (values - after).abs().mean() < 5e-2 * after.abs().mean()
    assert not torch.equal(values.bfloat16().float(), values)


@pytest.mark.slow
@pytest.mark.parametrize("one, two", [("hf", "hf FSDP2 x2"), ("megatron", "megatron TP2")])
def test_a_critic_goes_on_under_another_layout(golden, tmp_path, one, two):
    root, (_, metrics, after, _) = golden
    with Critic(one, root, tmp_path / "one") as critic:
        critic.workers.call("load_weights", root / "hf", True, timeout=60)
        critic.steps(rollout(), 2)
        (tmp_path / "saved").mkdir()
        critic.workers.call("save", tmp_path / "saved", timeout=60)
    with Critic(two, root, tmp_path / "two") as critic:
        critic.workers.call("load", tmp_path / "saved", True, timeout=60)
        (last,) = critic.steps(rollout(), 1)  # the third: values are scored anew before it
        assert last["grad_norm"] == pytest.approx(metrics[2]["grad_norm"], rel=1e-5)
        torch.testing.assert_close(critic.values(rollout()), after, rtol=1e-5, atol=1e-5)
