"""`--rollout-data-postprocess-path`: what it sees, and what its changes do to training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.errors import RolloutError
from instep.training.postprocess import postprocessed
from instep.types import TokenBatch

ME = __name__
seen: list[Any] = []


def make_batch() -> TokenBatch:
    columns = {"loss_mask": torch.tensor([1, 1, 0, 1.0]), "loss_weights": torch.tensor([0.25, 0.25, 0, 0.5])}
    columns |= {"advantages": torch.tensor([1, 2, 3, 4.0]), "log_probs": -torch.ones(4), "fresh": torch.ones(4)}
    rows = {"rewards": torch.tensor([0.5, 1.0]), "index": torch.tensor([7, 8]), "execution_id": ["a", "b"]}
    rows |= {"loss_scale": torch.ones(2)}
    return TokenBatch(torch.arange(7), torch.tensor([4, 3]), torch.tensor([3, 1]), columns, rows)


def run(function: str | None, batch: TokenBatch | None = None) -> TokenBatch:
    args: Any = SimpleNamespace(rollout_data_postprocess_path=function and f"{ME}.{function}")
    args.view = lambda runtime: args
    return postprocessed(args, 5, batch or make_batch())


def looks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    seen.append((rollout_id, rollout_data))


def test_slimes_names_and_no_change() -> None:
    before = make_batch()
    after = run("looks", before)
    rollout_id, data = seen.pop()
    assert rollout_id == 5 and [t.tolist() for t in data["tokens"]] == [[0, 1, 2, 3], [4, 5, 6]]
    assert data["response_lengths"] == [3, 1] and data["total_lengths"] == [4, 3] and data["sample_indices"] == [7, 8]
    assert [m.tolist() for m in data["loss_masks"]] == [[1, 1, 0], [1]] and data["raw_reward"] == [0.5, 1.0]
    assert not {"fresh", "loss_weights", "loss_scale", "loss_mask"} & data.keys()
    assert after.token_columns.keys() == before.token_columns.keys()
    assert all(torch.equal(after.token_columns[n], c) for n, c in before.token_columns.items())
    assert all(torch.equal(after.sample_columns[n], before.sample_columns[n]) for n in ("rewards", "index"))
    assert run(None, before) is before


def masks_and_scales(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["loss_masks"][0][1] = 0  # in place
    rollout_data["advantages"] = [a * 10 for a in rollout_data["advantages"]]
    rollout_data["entropy_bonus"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]
    rollout_data["kind"] = ["hard", "easy"]
    rollout_data["rewards"] = [2.0, 3.0]


def test_what_it_changes_is_trained_on() -> None:
    before = make_batch()
    after = run("masks_and_scales", before)
    assert after.token_columns["loss_mask"].tolist() == [1, 0, 0, 1]
    assert after.token_columns["loss_weights"].tolist() == [0.25, 0, 0, 0.5]  # over the denominators of the rollout
    assert after.token_columns["advantages"].tolist() == [10, 20, 30, 40]
    assert after.token_columns["entropy_bonus"].tolist() == [0] * 4 and after.sample_columns["kind"] == ["hard", "easy"]
    assert after.sample_columns["rewards"].tolist() == [2, 3]
    assert before.token_columns["loss_mask"].tolist() == [1, 1, 0, 1]  # the caller's batch is as it was


def adds_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["loss_masks"][0][2] = 1


def test_tokens_that_were_not_trained_on_stay_so() -> None:
    with pytest.raises(RolloutError, match="adds_tokens returned") as caught:
        run("adds_tokens")
    assert "rollout 5" in caught.value.where and "only remove trained tokens" in caught.value.remedy
