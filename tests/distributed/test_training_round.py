"""A whole training round on one rank and on two, in other micro-batches and another order: the same weights.

REINFORCE++ with its KL, discount and whitening has numbers that depend on all samples and tokens of the rollout. CISPO
takes several steps per rollout, so that its ratios act. The rollout has uneven groups, fan-out siblings, tool tokens
and a masked sample. `test_backends_agree.py` does the like with other losses and backends.
"""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from instep.arguments.parse import parse
from instep.checkpoints.folders import teacher_folder
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.errors import RolloutError
from instep.training import lr_schedule
from instep.types import Sample
from tests.assets import make_checkpoint, make_prompts
from tests.distributed.helpers import started_workers

NUM_ROUNDS = 2
FLAGS = {
    "reinforce_plus_plus": "--global-batch-size 12 --gamma 0.95",
    "rloo": "--global-batch-size 12",
    "cispo": "--global-batch-size 4 --eps-clip 0.001 --eps-clip-high 0.001",
    "grpo": "--global-batch-size 12 --use-tis",
}
LAYOUTS = {
    "one rank": (1, "--micro-batch-size 2"),
    "two ranks": (2, "--micro-batch-size 1"),
    "two ranks, packed": (2, "--use-dynamic-batch-size --max-tokens-per-gpu 100 --balance-data"),
}


def ragged_rollout():
    """Groups of 2, 3, 4 and 3 executions, 16 samples in all; two executions have three samples each."""
    rng, groups, index = random.Random(4), [], 0
    for g, sizes in enumerate(((1, 1), (3, 1, 1), (1, 1, 1, 1), (3, 1, 1))):
        group = []
        for e, siblings in enumerate(sizes):
            for _ in range(siblings):
                sample = Sample(group_index=g, index=index, execution_id=f"{g}.{e}", reward=float(e % 2) + 0.1 * g)
                sample.tokens = [rng.randrange(4, 50) for _ in range(rng.randrange(3, 12))]
                for part in range(rng.randrange(1, 4)):  # every second part is a tool's
                    tokens = [rng.randrange(4, 50) for _ in range(rng.randrange(1, 12))]
                    log_probs = [rng.uniform(-4.5, -3.5) for _ in tokens]
                    sample.append_response_tokens(tokens, None if part % 2 else log_probs, trainable=part % 2 == 0)
                sample.status, sample.sampling_params = Sample.Status.COMPLETED, {"temperature": 0.9}
                sample.remove_sample = index == 6
                group.append(sample)
                index += 1
        groups.append(group)
    return groups


def run_rounds(root, name, estimator, *, shuffled=False, groups=None, distils=False):
    num_ranks, more = LAYOUTS[name]
    folder = root / f"{name}-{estimator}-{shuffled}-{distils}".replace(" ", "-")
    flags = f"--rollout-batch-size 4 --n-samples-per-prompt 3 --num-rollout 9 {more} "
    flags += f"--advantage-estimator {estimator} --kl-coef 0.2 --kl-loss-type k3 --rollout-max-response-len 40 "
    flags += f"--use-opd --opd-kl-coef 0.5 --opd-teacher-load {root / 'teacher'} " if distils else ""
    flags += FLAGS[estimator] + " "
    flags += f"--train-backend hf --device cpu --lr 1e-3 --lr-decay-style constant --ref-load {root / 'hf'} "
    flags += f"--hf-checkpoint {root / 'hf'} --prompt-data {root / 'train.jsonl'} --input-key prompt "
    flags += "--label-key label --rm-type math "
    args = parse([*flags.split(), "--actor-num-gpus-per-node", str(num_ranks), "--run-dir", str(folder)], "train")
    args = args.replace(device="cpu", precision="fp32")
    groups = groups or ragged_rollout()
    if shuffled:
        random.Random(1).shuffle(groups)
        for group in groups:
            random.Random(2).shuffle(group)
    workers = started_workers(args, "actor", num_ranks, folder / "logs")
    try:
        requests = [(args, rank, num_ranks, str(folder / "rendezvous"), 1) for rank in range(num_ranks)]
        layout = workers.call("setup", timeout=180, per_rank=requests)
        workers.call("load_weights", root / "hf", timeout=60)
        workers.call("load_reference", root / "hf", timeout=60)
        if distils:
            workers.call("load_teacher", teacher_folder(args), timeout=60)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 100))
        training = TrainingRound(args, args.view({}), actor)
        rounds = [training.run(groups, step) for step in range(NUM_ROUNDS)]
        workers.call("export_hf", folder / "out", timeout=60)
    finally:
        workers.close()
    batch = rounds[-1].batch
    rows = batch.token_columns["advantages"].split(batch.response_lengths.tolist())
    advantages = dict(zip(batch.sample_columns["index"].tolist(), rows, strict=True))
    metrics = {name: value for name, value in rounds[-1].metrics.items() if not name.startswith("perf/")}
    return {**rounds[-1].steps[-1], **metrics}, advantages, load_file(folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    make_checkpoint(folder / "hf")
    make_checkpoint(folder / "teacher", seed=5, layers=3)
    make_prompts(folder / "train.jsonl", 16)
    return folder


SHUFFLED, PACKED = ("two ranks", True), ("two ranks, packed", False)  # with the samples in another order, or not


@pytest.mark.parametrize(
    ("estimator", "others", "distils"),
    [
        pytest.param("reinforce_plus_plus", [SHUFFLED, PACKED], False, marks=pytest.mark.slow),
        ("rloo", [SHUFFLED], False),
        pytest.param("cispo", [PACKED], False, marks=pytest.mark.slow),
        pytest.param("rloo", [SHUFFLED], True, marks=pytest.mark.slow),
    ],
)
def test_a_round_does_not_depend_on_the_layout(root, estimator, others, distils):
    metrics, advantages, weights = run_rounds(root, "one rank", estimator, distils=distils)
    assert ("train/opd_reverse_kl" in metrics) == distils
    assert metrics["train/reward_kl"] > 1e-4, "the first round has moved the policy, so that the KL counts"
    start = load_file(root / "hf" / "model.safetensors")
    moved = max((weights[name] - start[name]).norm() for name in weights)
    assert moved > 1e-3
    assert (metrics["pg_clipfrac"] > 0.02) == (estimator == "cispo")
    for name, shuffled in others:
        got, there, ours = run_rounds(root, name, estimator, shuffled=shuffled, distils=distils)
        assert got == pytest.approx(metrics, rel=1e-4, abs=2e-6), name
        for index, row in advantages.items():
            torch.testing.assert_close(there[index], row, rtol=1e-4, atol=1e-5)
        for key, want in weights.items():
            assert (ours[key] - want).norm() < 1e-5 * want.norm(), (name, key)


def test_a_sample_without_the_log_probs_that_the_loss_needs_is_named(root):
    groups = ragged_rollout()
    groups[2][1].rollout_log_probs = None
    with pytest.raises(RolloutError, match="have no engine log-probs, which --use-tis needs") as error:
        run_rounds(root, "one rank", "grpo", groups=groups)
    assert f"first sample {groups[2][1].index}" in error.value.where
    for group in groups:
        for sample in group:
            sample.rollout_log_probs = None
    with pytest.raises(RolloutError, match="--use-tis needs the column rollout_log_probs"):
        run_rounds(root, "one rank", "grpo", groups=groups)
