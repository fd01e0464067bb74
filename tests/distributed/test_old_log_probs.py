"""Old log-probs are those of the weights that made the samples, so that `--keep-old-actor` changes nothing."""

import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.training import lr_schedule
from tests.assets import make_checkpoint, make_prompts
from tests.distributed.helpers import started_workers
from tests.distributed.test_backends_agree import replayed_rollout, score


@pytest.mark.parametrize("backend", ["hf", pytest.param("megatron", marks=pytest.mark.slow)])
def test_old_log_probs_are_those_of_the_generating_weights(backend, tmp_path):
    """Two rounds of four optimizer steps: the workers' weights before a round are those that the engines were sent."""
    hf, data = make_checkpoint(tmp_path / "hf", layers=1), make_prompts(tmp_path / "train.jsonl", 16)
    words = f"--hf-checkpoint {hf} --prompt-data {data} --input-key prompt --label-key label --rm-type math "
    words += "--rollout-batch-size 4 --n-samples-per-prompt 4 --num-rollout 9 --global-batch-size 4 --lr 1e-3 "
    words += f"--lr-decay-style constant --train-backend {backend} --device cpu --keep-old-actor "
    args = parse([*words.split(), "--actor-num-gpus-per-node", "1", "--run-dir", str(tmp_path / "run")], "train")
    args = args.replace(device="cpu", precision="fp32")
    workers, groups = started_workers(args, "actor", 1, tmp_path / "logs"), replayed_rollout()
    samples = [sample for group in groups for sample in group]
    lengths = [sample.response_length for sample in samples]
    try:
        layout = workers.call("setup", timeout=180, per_rank=[(args, 0, 1, str(tmp_path / "rendezvous"), 1)])
        workers.call("load_weights", hf, timeout=60)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 100))
        training = TrainingRound(args, args.view({}), actor)
        generating = score(workers, layout, samples)
        for number in range(2):
            for sample, row in zip(samples, generating.split(lengths), strict=True):
                sample.rollout_log_probs = row.tolist()  # as an engine with these weights answers
            trained = training.run(groups, 4 * number)
            torch.testing.assert_close(trained.batch.token_columns["log_probs"], generating, rtol=1e-6, atol=1e-6)
            assert trained.steps[0]["ppo_kl"] == pytest.approx(0, abs=1e-6)
            assert abs(trained.steps[3]["ppo_kl"]) > 1e-4, "the last step's policy is another one"
            before, generating = generating, score(workers, layout, samples)
            assert (generating - before).abs().mean() > 1e-2
    finally:
        workers.close()
