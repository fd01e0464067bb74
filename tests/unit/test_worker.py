"""A worker of one rank, in this process: what it keeps, what it refuses to train, how it steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.arguments.parse import parse
from instep.training.gap import COLUMN, FreshGap
from instep.training.worker import Worker
from instep.types import TokenBatch
from tests.assets import make_checkpoint, make_prompts

NUM, PROMPT, RESPONSE = 4, 3, 5
STEPS = [[[0], [1]], [[2, 3]]]
LR = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 2)
    return folder


@pytest.fixture
def worker(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    def make(*flags: str) -> Worker:
        words = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --rollout-batch-size 1 "
        words += "--rm-type random --n-samples-per-prompt 4 --num-rollout 1 --actor-num-gpus-per-node 1 --device cpu "
        words += "--train-backend hf --weight-decay 0"
        made = Worker(lambda event: None)
        made.setup(parse([*words.split(), *flags]), 0, 1, str(tmp_path / "rendezvous"), 1)
        made.load_weights(folder / "hf")
        return made

    random_state = torch.get_rng_state()
    yield make
    dist.destroy_process_group()
    torch.set_rng_state(random_state)


def batch_for(worker: Worker, off: list[float]) -> TokenBatch:
    """Four samples; the engine's log-probs of sample i are the trainer's plus off[i]."""
    total, response = torch.full((NUM,), PROMPT + RESPONSE), torch.full((NUM,), RESPONSE)
    tokens = torch.randint(4, 40, (NUM * (PROMPT + RESPONSE),), generator=torch.Generator().manual_seed(1))
    ones = torch.ones(NUM * RESPONSE)
    columns = {"loss_mask": ones, "loss_weights": ones / (NUM * RESPONSE), COLUMN: ones}
    columns["advantages"] = torch.linspace(-1, 1, NUM * RESPONSE)
    batch = TokenBatch(tokens, total, response, columns, {"temperature": torch.ones(NUM)})
    scores = worker.log_probs(batch, [list(range(NUM))], ["log_probs"])
    assert scores is not None
    columns["rollout_log_probs"] = scores["log_probs"] + torch.tensor(off).repeat_interleave(RESPONSE)
    return batch


def trained(worker: Worker, batch: TokenBatch, **more: Any) -> tuple[list[dict[str, float]], dict[int, Any], Any]:
    out = worker.train(batch, STEPS, [LR, LR], **more)
    assert out is not None
    return out


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    return {spec.name: tensor.clone() for spec, tensor in worker.backend.weight_source() if tensor is not None}


def test_log_probs_and_entropies_are_kept_as_each_step_finds_them(worker: Callable[..., Worker]) -> None:
    one = worker()
    batch = batch_for(one, [0, 0, 0, 0])
    (before,) = one.backend.forward_only([batch], entropy=True) or ()
    steps, kept, _ = trained(one, batch, keep=[0, 1, 3])
    assert len(steps) == 2 and kept.keys() == {0, 1, 3}
    first = torch.stack([before.log_probs, before.entropy]).split(RESPONSE, 1)
    torch.testing.assert_close([kept[0], kept[1]], [first[0], first[1]])
    assert steps[0]["entropy"] == pytest.approx(float(torch.stack([kept[0][1], kept[1][1]]).mean()), rel=1e-5)
    assert not torch.allclose(kept[3], first[3], atol=1e-4)  # the first step has moved the policy


def test_the_largest_gap_of_a_step_is_that_of_all_its_micro_batches(worker: Callable[..., Worker]) -> None:
    one = worker()
    steps, _, _ = trained(one, batch_for(one, [0.1, 0.4, 0, 0]))
    assert steps[0]["log_prob_gap_max"] == pytest.approx(0.4, abs=1e-4)
    assert steps[0]["log_prob_gap_mean"] == pytest.approx(0.25, abs=1e-4)


def test_a_step_that_was_begun_is_the_whole_one(worker: Callable[..., Worker]) -> None:
    one = worker()
    batch, all_of_it, lrs = batch_for(one, [0.1, 0.4, 0, 0.3]), [[[0], [1], [2, 3]]], [0.0]
    whole, first, rest = one.train(batch, all_of_it, lrs), batch.select([2, 0]), batch.select([1, 3])
    assert whole is not None
    first.token_columns["loss_weights"] = first.token_columns["loss_weights"] * NUM

    for token in "one", "two":  # of the second time other gradients are begun before
        rows = one.begin_step(first, [[1], [0]], token)
        assert rows is not None and rows.keys() == {0, 1}
        assert (rows[1][0] - batch.token_columns["rollout_log_probs"][:RESPONSE] + 0.1).abs().max() < 1e-5
        got = one.train(rest, [[[0], [1]]], lrs, scale=1 / NUM)
        assert got is not None and got[0][0] == pytest.approx(whole[0][0], rel=1e-5)
        assert got[2] == pytest.approx(0.2, abs=1e-5) and whole[2] == pytest.approx(0.2, abs=1e-5)
        one.begin_step(batch, all_of_it[0], "three")
    again = one.train(batch, all_of_it, lrs)
    assert again is not None and again == whole, "what was begun leaves no trace"


def test_nothing_is_trained_where_the_gap_is_too_large(worker: Callable[..., Worker]) -> None:
    one = worker()
    before = weights(one)
    steps, _, refused = trained(one, batch_for(one, [0.1, 0.4, 9, 9]), gap_limit=0.2)
    assert steps == [] and refused == pytest.approx(0.25, abs=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(one).items())
    steps, _, gap = trained(one, batch_for(one, [0.1, 0.4, 9, 9]), gap_limit=0.3)
    assert len(steps) == 2 and gap == refused  # in the second step the policy has moved, whatever the gap


def test_a_rollout_that_was_scored_is_measured_by_its_scores(worker: Callable[..., Worker]) -> None:
    one = worker()
    batch = batch_for(one, [1, 1, 1, 1])
    batch.token_columns["log_probs"] = batch.token_columns["rollout_log_probs"] + 0.1
    steps, _, gap = trained(one, batch, gap_limit=0.05)
    assert steps == [] and gap == pytest.approx(0.1, abs=1e-4)
    steps, _, gap = trained(one, batch, gap_limit=0.2)
    assert len(steps) == 2 and gap == pytest.approx(0.1, abs=1e-4)


def test_the_gap_as_a_proof_is_that_of_fresh_trained_tokens(worker: Callable[..., Worker]) -> None:
    one = worker()
    batch = batch_for(one, [0.1, 5, 5, 5])
    columns, rows = batch.token_columns, [slice(i * RESPONSE, (i + 1) * RESPONSE) for i in range(NUM)]
    scores = columns["rollout_log_probs"] - torch.tensor([0.1, 5, 5, 5]).repeat_interleave(RESPONSE)
    columns[COLUMN] = columns[COLUMN].clone()
    columns[COLUMN][rows[1]] = columns["loss_weights"][rows[2]] = 0
    columns["rollout_log_probs"][rows[3]] = math.nan
    gap = FreshGap(torch.device("cpu"))
    gap.add(batch, scores)
    assert gap.mean() == pytest.approx(0.1, abs=1e-4)
    scores[0] = math.nan  # the trainer's own fault, for which its step is skipped
    gap = FreshGap(torch.device("cpu"))
    gap.add(batch, scores)
    assert gap.mean() == pytest.approx(0.1, abs=1e-4)


def test_gradients_are_clipped_and_only_matrices_decay(worker: Callable[..., Worker]) -> None:
    one = worker("--clip-grad", "1e-13", "--weight-decay", "0.5")
    batch, before = batch_for(one, [0, 0, 0, 0]), weights(one)
    steps, _, _ = trained(one, batch)
    assert steps[0]["grad_norm"] > 1e-3  # before the clip; what is left of it is far below Adam's epsilon
    for name, tensor in weights(one).items():
        decayed = (1 - 0.5 * LR) ** 2 if tensor.ndim > 1 else 1.0
        torch.testing.assert_close(tensor, before[name] * decayed, rtol=1e-6, atol=1e-6)


def test_a_step_whose_gradient_is_not_finite_changes_nothing(worker: Callable[..., Worker]) -> None:
    one = worker("--weight-decay", "0.5")
    batch, before = batch_for(one, [0, 0, 0, 0]), weights(one)
    batch.token_columns["advantages"] = torch.full((NUM * RESPONSE,), math.inf)
    steps, _, _ = trained(one, batch)
    assert [step["skipped_steps"] for step in steps] == [1.0, 1.0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(one).items())


def test_a_trainer_that_stays_gives_back_what_no_tensor_holds(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last passes would leave no room for the KV cache of engines that wake."""
    given: list[torch.device] = []
    monkeypatch.setattr("instep.training.worker.give_back", given.append)
    made = worker("--colocate", "--rollout-backend", "embedded", "--offload-rollout", "--no-offload-train")
    weights = sum(p.untyped_storage().nbytes() for p in made.backend.policy.parameters())  # type: ignore[attr-defined]
    made.offload(weights=True)
    assert given == [torch.device("cpu")]
    assert sum(p.untyped_storage().nbytes() for p in made.backend.policy.parameters()) == weights  # type: ignore[attr-defined]
