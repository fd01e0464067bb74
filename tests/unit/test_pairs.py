"""Preference pairs: rows of a file, their tokens, the schedule that keeps them together, and their loss."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from instep.arguments.parse import parse
from instep.data.batch import build_batch
from instep.data.dataset import check_file
from instep.data.rows import RowFormat
from instep.data.schedule import plan_whole_executions
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import ConfigError, DataError, RolloutError
from instep.rollout.dpo_rollout import generate_rollout
from instep.rollout.outputs import as_train_output
from instep.rollout.tokens import tokenizer_of
from instep.training.backend import TokenOutputs
from instep.training.losses import dpo_loss_fn
from tests.assets import make_checkpoint, make_pairs

USER = {"role": "user", "content": "1+1=?"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_checkpoint(folder / "hf", layers=1)
    make_pairs(folder / "pairs.jsonl", 12)
    return folder


def arguments(root: Path, *more: str, data: Path | None = None):
    line = f"--hf-checkpoint {root / 'hf'} --prompt-data {data or root / 'pairs.jsonl'} --rollout-batch-size 4 "
    line += "--num-rollout 3 --actor-num-gpus-per-node 1 --device cpu"
    return parse([*line.split(), *more], "dpo")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"prompt": [USER], "chosen": [says("2")], "rejected": [says("3")]}
BAD = {
    "no chosen": ({"prompt": "a", "rejected": "b"}, "the row has no 'chosen'"),
    "chosen is null": ({**GOOD, "chosen": None}, "'chosen' of the row is null"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "the row has no 'rejected'"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "the row has no 'prompt'"),
    "nothing in common": ({"chosen": [says("a")], "rejected": [says("b")]}, "begin with different messages"),
    "empty chosen": ({**GOOD, "chosen": []}, "'chosen' must be text or a list of messages, not []"),
    "empty text": ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
    "an empty turn": ({**GOOD, "rejected": [says("")]}, "'rejected' has no assistant turn with content"),
    "nothing after the prompt": ({"chosen": [USER, says("2")], "rejected": [USER]}, "'rejected' has no assistant turn"),
    "only the user": ({**GOOD, "chosen": [USER]}, "'chosen' has no assistant turn"),
    "equal": ({**GOOD, "rejected": GOOD["chosen"]}, "both responses are equal"),
    "two kinds": ({**GOOD, "prompt": "a"}, "'prompt' is text, 'chosen' is a list of messages"),
    "two kinds of responses": ({**GOOD, "rejected": "3"}, "'prompt' is a list of messages, 'rejected' is text"),
    "no role": ({**GOOD, "chosen": [{"content": "2"}]}, "message 0 has no role"),
    "a number": ({**GOOD, "chosen": 2}, "'chosen' must be text or a list of messages"),
    "no object": ([1], "a row must be a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, name: str):
    row, message = BAD[name]
    path = write(tmp_path / "data.jsonl", GOOD, row, GOOD)
    rows = RowFormat("prompt", pair_keys=("chosen", "rejected"))
    with pytest.raises(DataError) as error:
        check_file(str(path), rows)
    assert message in error.value.what and error.value.where == f"{path}, line 2" and error.value.remedy
    assert check_file(str(path), rows, skip_bad_rows=True) == 2


def test_bad_rows_are_skipped_and_counted_by_the_source(root: Path, tmp_path: Path):
    path = write(tmp_path / "data.jsonl", GOOD, BAD["equal"][0], {**GOOD, "chosen": [says("two")]})
    source = RolloutDataSourceWithBuffer(arguments(root, "--skip-bad-rows", data=path))
    assert len(source) == 2 and source.dataset.datasets[0].bad_rows.num == 1


def test_other_columns(root: Path, tmp_path: Path):
    path = write(tmp_path / "data.jsonl", {"question": "1+1", "good": "2", "poor": "3"})
    args = arguments(root, *"--input-key question --chosen-key good --rejected-key poor".split(), data=path)
    sample = RolloutDataSourceWithBuffer(args).get_samples(1)[0][0]
    assert sample.prompt == "1+1" and sample.label == {"chosen": "2", "rejected": "3"}


def test_tokens_and_masks(root: Path, tmp_path: Path):
    talk = [USER, says("2"), {"role": "user", "content": "and 2+2?"}]
    rows = [
        {"prompt": talk, "chosen": [says("4")], "rejected": [says("5 or so")]},
        {"chosen": [*talk, says("4"), USER, says("two")], "rejected": [*talk, says("5")]},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3<|im_end|>"},
        {**GOOD, "rejected": [{**says("0"), "step_loss_mask": 0}, USER, says("3")]},
    ]
    args = arguments(root, data=write(tmp_path / "data.jsonl", *rows))
    output = as_train_output(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
    tokenizer = tokenizer_of(args)

    def trained(sample) -> str:
        ids = sample.tokens[-sample.response_length :]
        return tokenizer.decode([i for i, m in zip(ids, sample.loss_mask, strict=True) if m])

    end = "<|im_end|>"
    assert [[trained(s) for s in group] for group in output.samples] == [
        ["4" + end, "5 or so" + end],
        ["4" + end + "two" + end, "5" + end],
        ["2" + end, "3" + end],
        ["2" + end, "3" + end],
    ]
    for group in output.samples:
        assert [s.reward for s in group] == [1.0, 0.0] and len({s.execution_id for s in group}) == 1
        assert len({s.index for s in group}) == 1
    assert len({group[0].execution_id for group in output.samples}) == 4
    first = output.samples[0][0]
    assert tokenizer.decode(first.tokens[: first.prompt_length]).endswith("and 2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_the_prompt_limit_holds(root: Path, tmp_path: Path):
    path = write(tmp_path / "data.jsonl", GOOD, {**GOOD, "prompt": [{"role": "user", "content": "1" * 90}]})
    source = RolloutDataSourceWithBuffer(arguments(root, "--rollout-max-prompt-len", "50", data=path))
    assert len(source) == 1 and source.dataset.datasets[0].num_too_long == 1


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("sizes", [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"max_tokens_per_gpu": 60}])
@pytest.mark.parametrize("balance_data", [False, True])
def test_a_pair_lies_in_one_micro_batch(dp_size: int, sizes: dict, balance_data: bool):
    rng = random.Random(1)
    ids = [f"pair {i // 2}" for i in range(32)]
    lengths = [rng.randrange(2, 40) for _ in ids]
    schedule = plan_whole_executions(
        ids, lengths, dp_size=dp_size, global_batch_size=8, balance_data=balance_data, **sizes
    )
    assert len(schedule) == 2 and sorted(i for s in schedule for r in s for m in r for i in m) == list(range(32))
    for step, ranks in enumerate(schedule):
        assert len({len(rank) for rank in ranks}) == 1
        for micro_batch in (m for rank in ranks for m in rank):
            assert [i + 1 for i in micro_batch[::2]] == micro_batch[1::2], "chosen and rejected, side by side"
            assert all(i % 2 == 0 and i // 16 == step for i in micro_batch[::2])
            if "max_tokens_per_gpu" in sizes:
                assert len(micro_batch) == 2 or sum(lengths[i] for i in micro_batch) <= 60
            else:
                assert len(micro_batch) <= 2 * sizes["micro_batch_size"]


def batch_of(root: Path):
    args = arguments(root, "--rollout-batch-size", "6")
    groups = as_train_output(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))).samples
    batch = build_batch(groups, needs_reward=False)
    batch.sample_columns["loss_scale"] = torch.full((12,), 1 / 6)
    generator = torch.Generator().manual_seed(3)
    size = batch.token_columns["loss_mask"].numel()
    batch.token_columns["ref_log_probs"] = -torch.rand(size, generator=generator)
    return batch, -2 * torch.rand(size, generator=generator)


def test_micro_batches_and_what_is_masked_do_not_matter(root: Path):
    batch, values = batch_of(root)
    loss_fn, lengths = dpo_loss_fn(0.4, 0.1), batch.response_lengths.tolist()
    results = []
    for parts in ([list(range(12))], [[4, 5, 0, 1], [10, 11], [2, 3, 6, 7, 8, 9]]):
        rows = [row.clone().requires_grad_() for row in values.split(lengths)]
        outputs = [loss_fn(batch.select(p), TokenOutputs(torch.cat([rows[i] for i in p]))) for p in parts]
        sum(o.loss for o in outputs).backward()
        sums = {name: sum(float(o.sums[name]) for o in outputs) for name in outputs[0].sums}
        results.append((sums, torch.cat([row.grad for row in rows])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][0]["loss_weight"] == pytest.approx(1) and 0 < results[0][0]["reward_accuracy"] < 1
    masked = batch.token_columns["loss_mask"] == 0
    assert masked.any() and not results[0][1][masked].any() and results[0][1][~masked].all()


def test_a_pair_that_is_torn_apart_is_refused(root: Path):
    batch, values = batch_of(root)
    for indices in ([0, 2], [0, 1, 2], [1, 2]):
        part = batch.select(indices)
        with pytest.raises(RolloutError, match="not made of pairs"):
            dpo_loss_fn(0.1)(part, TokenOutputs(values[: int(part.response_lengths.sum())]))


REFUSED = [
    ("--loss-type sft_loss", "dpo trains dpo_loss"),
    ("--n-samples-per-prompt 2", "responses from the data"),
    ("--apply-chat-template", "the messages themselves"),
    ("--calculate-per-token-loss", "no meaning for `instep dpo`"),
    ("--rollout-temperature 0.5", "`instep dpo` samples nothing"),
    ("--label-key label", "no meaning for `instep dpo`"),
    ("--use-kl-loss", "no meaning for `instep dpo`"),
    ("--dpo-beta 0", "must be above 0"),
    ("--dpo-label-smoothing 0.5", "at most 0.49"),
    ("--eval-interval 2", "`instep dpo` samples nothing"),
]


@pytest.mark.parametrize(("extra", "words"), REFUSED)
def test_flags_that_make_no_sense(root: Path, extra: str, words: str):
    with pytest.raises(ConfigError) as error:
        arguments(root, *extra.split())
    assert words in str(error.value)


def test_defaults(root: Path):
    args = arguments(root)
    assert (args.loss_type, args.input_key, args.n_samples_per_prompt) == ("dpo_loss", "prompt", 1)
    assert (args.rollout_num_engines, args.run_dir, args.global_batch_size) == (0, "runs/dpo", 4)
    for command in ("sft", "train"):
        with pytest.raises(ConfigError, match="instep dpo"):
            line = f"--hf-checkpoint {root / 'hf'} --prompt-data {root / 'pairs.jsonl'} --rollout-batch-size 4 "
            line += (
                "--num-rollout 3 --actor-num-gpus-per-node 1 --device cpu --dpo-beta 0.2 --rollout-max-response-len 8"
            )
            parse([*line.split(), "--rm-type", "math"] if command == "train" else line.split(), command)


def test_accuracy_and_margin_speak_for_the_chosen(root: Path):
    batch, _ = batch_of(root)
    lengths = batch.response_lengths.tolist()
    now = torch.cat([torch.full((n,), -3.0 * (i % 2)) for i, n in enumerate(lengths)])  # log-prob 0 of the chosen
    sums = dpo_loss_fn(0.4)(batch, TokenOutputs(now)).sums
    assert sums["reward_accuracy"].item() == pytest.approx(1)
    assert sums["chosen_reward"] > 0 > sums["rejected_reward"]
    assert sums["reward_margin"].item() == pytest.approx(float(sums["chosen_reward"] - sums["rejected_reward"]))
