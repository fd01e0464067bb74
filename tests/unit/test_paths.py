"""What a run writes harms nothing of what it reads, of what it writes elsewhere, and of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instep.arguments.all_flags import own_flags
from instep.arguments.flag import files, path, text
from instep.arguments.parse import parse
from instep.arguments.paths import USES
from tests.command_line import argv, make_folder, refusal


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    return make_folder(tmp_path / "work", monkeypatch)


# Text flags: none of them names a path.
NAMES = """
input_key label_key chosen_key rejected_key metadata_key tool_key rm_url reward_key eval_reward_key
allowed_hosts eval_input_key eval_label_key eval_tool_key ref_served_model ray_address vllm_router_ip
rollout_external_engine_addrs wandb_key wandb_host wandb_team wandb_group wandb_project wandb_run_id
lora_target_modules env env_address env_renderer trackio_project trackio_run_name trackio_server_url
"""


def test_every_path_flag_is_in_the_table():
    acting = [f for f in own_flags().values() if f.status == "acts" and not f.choices]
    assert {f.attribute for f in acting if f.type in (path, files)} == set(USES) | {"env_python", "eval_prompt_data"}
    assert {f.attribute for f in acting if f.type is text} == set(NAMES.split())


REFUSED = {
    "--save-hf .": "is the current folder",
    "--save-hf ..": "which contains the current folder",
    "--save-hf ../..": "which contains the current folder",
    "--save-hf out/..": "is the current folder",
    "--save-hf /": "each save would replace /, which contains",
    "--save-hf model": "which is --hf-checkpoint",
    "--save-hf link": "which is --hf-checkpoint",
    "--save-hf data.jsonl/x": "cannot write to",
    "--save-hf out --save out": "which is --save",
    "--save-hf out --save out/ckpt": "which contains --save",
    "--save-hf out --run-dir out": "which is --run-dir",
    "--save-hf runs": "which contains --run-dir",
    "--save-hf out/{rollout_id} --load out/0": "which is --load",
    "--save-hf out/{rollout_id} --load out/100": "out/100, which is --load",
    "--save-hf out/{step} --load out/100": "out/100, which is --load",
    "--run-dir .": "is the current folder",
    "--save ..": "is the home folder",
    "--run-dir model": "which --hf-checkpoint reads",
    "--save model": "which --hf-checkpoint reads",
    "--save model --ref-load model --load out": "which --hf-checkpoint reads",
    "--save out --critic-save out": "is also the folder of --critic-save",
    "--run-dir out --load out": "which --load reads",
    "--finetune --load out --save out": "would replace the checkpoints that it loads",
    "--dump-details data.jsonl": "cannot write to",
    "--dump-details data.jsonl/x": "cannot write to",
    "--save-debug-rollout-data {rollout_id}/../data.jsonl": "which is --prompt-data",
    "--save-debug-train-data {rollout_id}/../model": "is a folder",
    "--use-wandb --wandb-dir data.jsonl": "cannot write to",
}


@pytest.mark.parametrize("extra", REFUSED)
def test_a_path_that_would_do_harm_is_refused(extra, folder):
    os.symlink("model", "link")
    before = sorted(folder.rglob("*"))
    text = refusal(f"{extra} --advantage-estimator ppo" if "--critic-save" in extra else extra)
    assert REFUSED[extra] in text and "things are wrong" not in text  # one mistake, one problem
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "extra",
    [
        "--run-dir out --save out/ckpt --load out/ckpt --save-hf out/hf",
        "--run-dir out --save out --wandb-dir out --use-wandb --dump-details out",
        "--run-dir out --save out/ckpt --save-hf out/ckpt/hf-{rollout_id}",
        "--save ../ckpt --save-hf hf",
        "--save model/ckpt --run-dir model/run",
        "--dump-details d --save-debug-rollout-data d/rollout_data/{rollout_id}.pt",
        "--load model --save model/ckpt",
    ],
)
def test_paths_that_do_no_harm(extra):
    assert parse(argv(extra)).hf_checkpoint == "model"


def test_a_checkpoint_within_the_run_folder_of_the_next_run_is_read():
    """As examples/quickstart has it: SFT exports to runs/cups/sft/hf, GRPO begins with it and writes to runs/cups."""
    Path("out/sft").mkdir(parents=True)
    os.rename("model", "out/sft/hf")
    args = parse(argv("--hf-checkpoint out/sft/hf --run-dir out --save-hf out/hf", "--hf-checkpoint"))
    assert args.run_dir == "out"
    text = refusal("--hf-checkpoint out/sft/hf --run-dir out --save-hf out/sft", "--hf-checkpoint")
    assert "which contains --hf-checkpoint" in text


def test_serve_writes_to_no_model():
    assert "which --hf-checkpoint reads" in refusal(
        "--hf-checkpoint model --run-dir model", " ".join(argv()[::2]), command="serve"
    )
