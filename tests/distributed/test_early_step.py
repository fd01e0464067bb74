"""A step begun with groups of an unfinished rollout is that of the whole rollout: on real workers of both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.arguments.parse import parse
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainedBatch, TrainingRound
from instep.training import lr_schedule
from instep.types import Group
from tests.assets import make_checkpoint, make_prompts
from tests.distributed.helpers import started_workers
from tests.distributed.test_backends_agree import replayed_rollout

TIS_AND_KL = "--use-tis --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 "
LAYOUTS = {
    "hf": (1, "--train-backend hf --calculate-per-token-loss " + TIS_AND_KL),
    "hf, FSDP2 x2": (2, "--train-backend hf --kl-coef 0.1 --advantage-estimator rloo"),
    "hf, mirrored x2": (2, "--train-backend hf --weight-sync single-copy --calculate-per-token-loss"),
    "hf, TP2": (2, "--train-backend hf --tensor-model-parallel-size 2 " + TIS_AND_KL),
    "hf, LoRA": (1, "--train-backend hf --lora-rank 4 --advantage-estimator max_rl"),
    "megatron": (1, "--train-backend megatron " + TIS_AND_KL),
    "megatron, LoRA": (2, "--train-backend megatron --tensor-model-parallel-size 2 --lora-rank 4 " + TIS_AND_KL),
    "megatron, DP2": (2, "--train-backend megatron --use-distributed-optimizer --calculate-per-token-loss"),
    "megatron, PP2": (2, "--train-backend megatron --pipeline-model-parallel-size 2 --entropy-coef 0.01"),
    "megatron, PP2, virtual stages": (
        2,
        "--train-backend megatron --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "megatron, TP2": (2, "--train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel"),
    "megatron, CP2": (2, "--train-backend megatron --context-parallel-size 2"),
}


class Trained:
    """Workers that begin anew with each list of rounds."""

    def __init__(self, root: Path, layout: str):
        num_ranks, flags = LAYOUTS[layout]
        hf = root / ("deep" if "virtual" in layout else "hf")
        self._folder = root / "runs" / layout.replace(", ", "-").replace(" ", "-")
        words = "--rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --num-rollout 9 --lr 1e-3 "
        words += f"--micro-batch-size 1 --lr-decay-style constant --device cpu --ref-load {hf} {flags} "
        words += f"--hf-checkpoint {hf} --prompt-data {root / 'train.jsonl'} --input-key prompt "
        words += f"--label-key label --rm-type math --actor-num-gpus-per-node {num_ranks} --run-dir {self._folder} "
        words += "--rollout-num-gpus 1 --rollout-backend embedded --precision fp32"
        self.args = parse(words.split(), "train")
        self.workers = started_workers(self.args, "actor", num_ranks, self._folder / "logs")
        requests = [(self.args, rank, num_ranks, str(self._folder / "rendezvous"), 1) for rank in range(num_ranks)]
        self._layout = self.workers.call("setup", timeout=180, per_rank=requests)
        self.workers.call("load_weights", hf, timeout=60)
        self.workers.call("load_reference", hf, timeout=60)
        (self._folder / "start").mkdir(parents=True)
        self.workers.call("save", self._folder / "start", timeout=60)

    def rounds(
        self, groups: list[Group], *early: list[list[int]], change: Callable[[list[Group]], object] | None = None
    ) -> tuple[list[TrainedBatch], dict[str, torch.Tensor]]:
        """Each round as it was trained, and the weights after the last.

        Args:
            early: by round the groups that are finished together, before the rollout of all groups is.
            change: is called with the groups before the rollout has ended.
        """
        self.workers.call("load", self._folder / "start", True, timeout=60)
        actor = RoleTrainer(self.args, self.workers, self._layout, lr_schedule.from_args(self.args, 100))
        training = TrainingRound(self.args, self.args.view({}), actor)
        out = []
        for number, finished in enumerate(early):
            work = training.early(number, 0)
            assert work is not None and work.step is not None
            for numbers in finished:
                for i in numbers:
                    work.add(groups[i])
                work.work()
            assert bool(work.step.seconds) == bool(finished)
            if change is not None:
                change(groups)
            out.append(training.run(groups, number, range(3), rollout_id=number, early=work))
        self.workers.call("export_hf", self._folder / "out", timeout=60)
        return out, load_file(self._folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    make_checkpoint(folder / "hf")
    make_checkpoint(folder / "deep", layers=4)  # for virtual stages
    make_prompts(folder / "train.jsonl", 16)
    return folder


FEW = ("hf", "megatron, DP2")


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in LAYOUTS], ids=str
)
def trained(root: Path, request: pytest.FixtureRequest) -> Iterator[Trained]:
    made = Trained(root, request.param)
    yield made
    made.workers.close()


def check_same(got: tuple[Any, Any], want: tuple[Any, Any], rel: float) -> None:
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert ours.steps[0] == pytest.approx(theirs.steps[0], rel=max(10 * rel, 1e-12), abs=1e-6 if rel else 0)
        assert ours.log_probs.keys() == theirs.log_probs.keys() == {0, 1, 2}
        for i, row in theirs.log_probs.items():
            torch.testing.assert_close(ours.log_probs[i], row, rtol=0, atol=1e-5 if rel else 0)
    for name, weight in want[1].items():  # AdamW makes a step of a rounding, where a gradient is next to nothing
        assert (got[1][name] - weight).norm() <= 10 * rel * weight.norm(), name


def test_the_step_is_that_of_the_whole_rollout(trained: Trained) -> None:
    groups = replayed_rollout()
    whole = trained.rounds(groups, [], [])
    begun = trained.rounds(groups, [[2], [0, 1]], [[0], [3]])
    check_same(begun, whole, 1e-6)
    start = trained.rounds(groups)[1]
    assert max((whole[1][name] - start[name]).norm() / start[name].norm() for name in start) > 1e-3


def test_a_group_that_is_not_trained_on_leaves_no_trace(trained: Trained) -> None:
    """It was dropped after all, or has become another; the others are trained as if nothing had been begun."""

    def replace(groups: list[Group]) -> None:
        groups[0] = replayed_rollout()[0][::-1]

    def reward(groups: list[Group]) -> None:
        groups[2][1].reward = 7.0

    for change in replace, reward:
        got = trained.rounds(replayed_rollout(), [[2], [0]], change=change)
        want = trained.rounds(replayed_rollout(), [], change=change)
        check_same(got, want, 0.0)
