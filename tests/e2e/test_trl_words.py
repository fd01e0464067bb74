"""`instep.train` as a user of TRL calls it: reward functions, datasets and fields of GRPOConfig, in one short run."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

import instep
from tests.e2e.test_train import rows


@pytest.mark.usefixtures("no_plots")
def test_reward_funcs_datasets_and_fields(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []

    def length(completions: list[Any], completion_ids: list[list[int]], level: list[int], **_: Any) -> list[float]:
        seen.append((len(completions), level))
        assert all(len(c) == 1 and c[0]["role"] == "assistant" for c in completions)
        return [-len(ids) / 16 for ids in completion_ids]

    async def even(completion_ids: list[list[int]], completions: list[Any], **_: Any) -> list[float | None]:
        return [None if len(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]

    prompts = [json.loads(line)["prompt"] for line in (tiny / "train.jsonl").read_text().splitlines()][:8]
    run = instep.Run(
        model=tiny / "hf",
        reward_funcs=[length, even],
        reward_weights=[1.0, 0.5],
        train_dataset=[{"prompt": prompt, "level": n} for n, prompt in enumerate(prompts)],
        eval_dataset=[{"prompt": prompt, "level": 99} for prompt in prompts[:2]],
        eval_strategy="steps",
        eval_steps=2,
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_generations=4,
        num_generations_eval=2,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_completion_length=16,
        scale_rewards="batch",
        mask_truncated_completions=True,
        save_steps=2,
        report_to="none",
        train_backend="hf",
        num_threads=1,
    )
    steps = list(run)
    assert run.summary["num_steps"] == 4 and [len(step.samples) for step in steps] == [4, 4]
    levels = {level for _, (level, *_) in seen}
    assert {size for size, _ in seen} == {2, 4} and 99 in levels and levels - {99} <= set(range(8))
    assert all(len(set(level)) == 1 for _, level in seen)  # a group at a time
    for step in steps:
        samples = [sample for group in step.samples for sample in group]
        for s in samples:
            right = None if s.response_length % 3 == 0 else float(sum(s.tokens[s.prompt_length :]) % 2)
            assert (s.reward["length"], s.reward["even"]) == (-s.response_length / 16, right)
            assert s.reward["reward"] == s.reward["length"] + 0.5 * (right or 0.0)
            assert s.remove_sample == s.truncated
        mean = statistics.mean(s.reward["reward"] for s in samples)
        assert step.metrics["rollout/reward_mean"] == pytest.approx(mean)
    assert steps[-1].evaluation and any(s.truncated for step in steps for group in step.samples for s in group)
    losses = [row["train/loss"] for row in rows(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert (tmp_path / "hf/model.safetensors").exists() and any((tmp_path / "checkpoints").iterdir())
