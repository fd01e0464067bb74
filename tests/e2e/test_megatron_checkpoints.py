"""A run as slime's users start it: from a converted `release`, to which a resume adds."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoints.integrity import check_whole
from tests.e2e.commands import grpo_arguments, run, sft_arguments

pytestmark = pytest.mark.slow

FLAGS = ["--train-backend", "megatron", "--rollout-backend", "embedded", "--rollout-max-context-len", "128"]


def steps(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def instep(*words):
    done = run([str(word) for word in words], 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_run_begins_with_a_release_and_its_save_is_converted_back(tiny, tmp_path):
    release, other, save = tmp_path / "release", tmp_path / "hf", tmp_path / "save"
    shutil.copytree(tiny / "hf", other)
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    from safetensors.torch import save_file

    moved = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    instep("convert", "hf-to-megatron", "--hf-checkpoint", other, "--save", release)
    more = [*FLAGS, "--save", str(save), "--save-interval", "1", "--save-hf", str(tmp_path / "out")]
    said = instep(*grpo_arguments(tiny, tmp_path / "a", *more, "--load", str(save), "--ref-load", str(release)))
    instep(*grpo_arguments(tiny, tmp_path / "b", *FLAGS, "--ref-load", str(other)))
    instep(*grpo_arguments(tiny, tmp_path / "c", *FLAGS, "--load", str(release)))
    first, second, third = (steps(tmp_path / name) for name in "abc")
    assert len(first) == 2 and "another framework" not in said
    for row, same, again in zip(first, second, third, strict=True):
        assert row["train/loss"] == same["train/loss"] == again["train/loss"]
        assert row["train/grad_norm"] == same["train/grad_norm"] == again["train/grad_norm"]
    instep("convert", "megatron-to-hf", "--load", save, "--hf-checkpoint", tiny / "hf", "--save", tmp_path / "back")
    exported, back = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "back"))
    assert exported.keys() == back.keys() and all(torch.equal(back[name], exported[name]) for name in back)


def test_a_run_that_saves_in_the_format_torch_goes_on_bit_by_bit(tiny, tmp_path):
    """It has two tensor-parallel ranks; its last checkpoint is converted."""
    flags = "--train-backend megatron --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 --deterministic-mode "
    words = [*flags.split(), "--num-rollout", "4", "--save-interval", "2", "--ckpt-format", "torch"]
    instep(*sft_arguments(tiny, tmp_path / "a", *words))
    begun = tmp_path / "a" / "ckpt"
    first = begun / "iter_0000001"
    assert {str(p.relative_to(first)) for p in first.rglob("*.pt")} == {
        "mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt", "rng_0.pt", "rng_1.pt"
    }  # fmt: skip
    check_whole(first)
    instep(*sft_arguments(tiny, tmp_path / "b", *words, "--load", str(begun), "--ckpt-step", "1"))
    whole, resumed = steps(tmp_path / "a")[2:], steps(tmp_path / "b")
    names = ("step", "train/loss", "train/grad_norm")
    assert [[row[n] for n in names] for row in whole] == [[row[n] for n in names] for row in resumed]
    instep("convert", "megatron-to-hf", "--load", begun, "--hf-checkpoint", tiny / "hf", "--save", tmp_path / "back")
    exported, back = (load_file(tmp_path / n / "model.safetensors") for n in ("a/hf", "back"))
    assert exported.keys() == back.keys() and all(torch.equal(back[name], exported[name]) for name in back)
