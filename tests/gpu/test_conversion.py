"""Fields of a conversion of the user's in a loss on a GPU: tensors `[num_rows, ...]` are there, lists as they were."""

from __future__ import annotations

import pytest
import torch

from instep.arguments.parse import parse
from instep.data.batch import build_batch
from instep.data.conversion import FLAG, read_conversion
from instep.system.hooks import Hook
from instep.training.backend import TokenOutputs
from instep.training.loss_hooks import custom_loss_fn
from instep.types import Sample
from tests.assets import make_checkpoint, make_prompts
from tests.loss_hooks import convert_with_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_fields_reach_a_loss_on_a_gpu(tmp_path):
    make_checkpoint(tmp_path / "hf", layers=1)
    make_prompts(tmp_path / "train.jsonl", 2)
    words = (
        f"--hf-checkpoint {tmp_path}/hf --prompt-data {tmp_path}/train.jsonl --rollout-batch-size 2 --rm-type random "
    )
    words += "--n-samples-per-prompt 2 --num-rollout 1 --actor-num-gpus-per-node 1 --train-backend hf --loss-type "
    words += "custom_loss --custom-loss-function-path tests.loss_hooks.weighted_loss"
    args = parse(words.split())
    samples = []
    for i in range(4):
        samples.append(Sample(group_index=i // 2, index=i, tokens=[4, 5], reward=float(i % 2)))
        samples[-1].append_response_tokens([6, 7, 8], [-1.0] * 3)
    answer = convert_with_weights(args.view({}), samples) | {"own": torch.arange(8.0).view(4, 2)}
    made = read_conversion(Hook(FLAG, ""), answer, samples, needs_reward=True, global_batch_size=4)
    batch = build_batch([[sample] for sample in made.samples], needs_reward=False)
    batch.sample_columns |= made.sample_columns
    batch.sample_columns["loss_scale"] = torch.full((4,), 0.25)
    batch.token_columns["loss_weights"] = torch.full((12,), 1 / 12)
    batch.token_columns["advantages"] = made.sample_columns["rewards"].repeat_interleave(3)
    batch.token_columns["log_probs"] = torch.full((12,), -3.0)
    losses = []
    for device in ("cpu", "cuda"):
        there = batch.to(device)
        assert there.sample_columns["own"].device.type == device and len(there.sample_columns["weights"]) == 4
        logits = torch.linspace(-1, 1, 20 * 50, device=device).view(1, 20, 50).requires_grad_()
        out = custom_loss_fn(args)(there, TokenOutputs(there.token_columns["log_probs"], logits=logits))
        out.loss.backward()
        losses.append((out.loss.item(), logits.grad.norm().item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6) and losses[0][1] > 0
