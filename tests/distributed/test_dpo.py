"""`instep dpo` from the file to the weights: in every layout those of plain torch, one pair after another."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from instep.arguments.parse import parse
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.data.source import RolloutDataSourceWithBuffer
from instep.rollout.dpo_rollout import generate_rollout
from instep.training import lr_schedule
from tests.assets import make_checkpoint, make_pairs
from tests.distributed.helpers import started_workers

LR, BETA, SMOOTHING, NUM_ROUNDS, PAIRS, STEPS = 1e-3, 0.3, 0.1, 2, 8, 2
PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 130 --balance-data"
LAYOUTS = {
    "hf": ("hf", 1, "--micro-batch-size 2"),
    "hf FSDP2 x2": ("hf", 2, "--micro-batch-size 1"),
    "hf FSDP2 x2 packed": ("hf", 2, PACKED),
    "megatron": ("megatron", 1, PACKED),
    "megatron TP2": ("megatron", 2, "--tensor-model-parallel-size 2 --micro-batch-size 4"),
    "megatron DP2": ("megatron", 2, "--use-distributed-optimizer --micro-batch-size 2"),
    "megatron PP2": ("megatron", 2, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
}


def run_layout(name, root, folder):
    backend, num_ranks, more = LAYOUTS[name]
    flags = f"--hf-checkpoint {root / 'hf'} --prompt-data {root / 'pairs.jsonl'} --ref-load {root / 'ref'} "
    flags += f"--load {root / 'hf'} --rollout-batch-size {PAIRS} --num-steps-per-rollout {STEPS} --num-rollout 9 "
    flags += f"--dpo-beta {BETA} --dpo-label-smoothing {SMOOTHING} --lr {LR} --lr-decay-style constant --device cpu "
    flags += f"--weight-decay 0.05 --adam-eps 1e-4 --train-backend {backend} {more} --run-dir {folder}"
    args = parse([*flags.split(), "--actor-num-gpus-per-node", str(num_ranks)], "dpo")
    args = args.replace(device="cpu", precision="fp32")
    source = RolloutDataSourceWithBuffer(args)
    workers = started_workers(args, "actor", num_ranks, folder / "logs")
    try:
        requests = [(args, rank, num_ranks, str(folder / "rendezvous"), 1) for rank in range(num_ranks)]
        layout = workers.call("setup", timeout=180, per_rank=requests)
        workers.call("load_weights", root / "hf", timeout=60)
        workers.call("load_reference", root / "ref", timeout=60)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 100))
        training = TrainingRound(args, args.view({}), actor)
        assert training.uses_reference
        metrics = []
        for n in range(NUM_ROUNDS):
            metrics += training.run(generate_rollout(args, n, source).samples, n * STEPS).steps
        workers.call("export_hf", folder / "out", timeout=60)
    finally:
        workers.close()
    return metrics, load_file(folder / "out" / "model.safetensors")


def texts(row):
    """(prompt, chosen, rejected) as a model sees them."""
    if isinstance(row["chosen"], str):
        return row["prompt"], *(row[key] + "<|im_end|>" for key in ("chosen", "rejected"))
    user = (row.get("prompt") or row["chosen"])[0]["content"]
    prompt = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, *(row[key][-1]["content"] + "<|im_end|>" for key in ("chosen", "rejected"))


def oracle(root):
    """Plain transformers and AdamW; the loss as in eq. 7 of arXiv:2305.18290, with flipped labels."""
    load = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, reference = (AutoModelForCausalLM.from_pretrained(root / name, **load) for name in ("hf", "ref"))
    tokenizer = AutoTokenizer.from_pretrained(root / "hf")
    named = dict(model.named_parameters())
    decay, rest = ([p for p in named.values() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-4)

    def log_prob(net, prompt, response):
        first, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
        logits = net(torch.tensor([first + ids])).logits[0, len(first) - 1 : -1]
        return logits.log_softmax(-1)[range(len(ids)), ids].sum()

    rows = [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]
    metrics = []
    for step in range(NUM_ROUNDS * STEPS):
        size = PAIRS // STEPS
        losses, margins = [], []
        for row in rows[step * size : (step + 1) * size]:
            prompt, *pair = texts(row)
            with torch.no_grad():
                before = [log_prob(reference, prompt, response) for response in pair]
            now = [log_prob(model, prompt, response) for response in pair]
            z = BETA * ((now[0] - before[0]) - (now[1] - before[1]))
            losses.append(-(1 - SMOOTHING) * z.sigmoid().log() - SMOOTHING * (-z).sigmoid().log())
            margins.append(float(z.detach()))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accuracy = sum(m > 0 for m in margins) / size
        values = {"loss": float(loss.detach()), "grad_norm": float(norm), "reward_margin": sum(margins) / size}
        metrics.append({**values, "reward_accuracy": accuracy})
    return metrics, {name: p.detach() for name, p in named.items()}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp("dpo")
    make_checkpoint(root / "hf")
    make_checkpoint(root / "ref", seed=1)
    make_pairs(root / "pairs.jsonl", NUM_ROUNDS * PAIRS)
    return root, oracle(root)


FEW = ("hf FSDP2 x2", "megatron TP2")
FAST = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("name", FAST)
def test_steps_are_plain_torchs_in_every_layout(golden, tmp_path, name):
    root, (want_metrics, want) = golden
    metrics, weights = run_layout(name, root, tmp_path)
    assert len(metrics) == len(want_metrics) == NUM_ROUNDS * STEPS
    for got, expected in zip(metrics, want_metrics, strict=True):
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, rel=2e-5, abs=1e-5), key
        assert got["loss_weight"] == pytest.approx(1)
    assert max(m["reward_margin"] for m in metrics) != min(m["reward_margin"] for m in metrics)
    for key, tensor in want.items():
        if key in weights:
            assert (weights[key] - tensor).norm() < 1e-5 * tensor.norm(), key
