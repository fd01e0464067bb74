"""What is said of a word that is no flag: neighbours' names first, then near spellings within the same command."""

from __future__ import annotations

import pytest

from instep.arguments.all_flags import find
from instep.arguments.parser import scan
from instep.arguments.suggest import acts_in, named_flags
from tests.command_line import make_folder, refusal

SAID = [
    ("train --num_generations 8", "TRL's num_generations", "use --n-samples-per-prompt"),
    ("sft --num_generations 8", "TRL's num_generations", "leave it out: it has no meaning for `instep sft`"),
    ("train --peft_config x", "TRL's peft_config", "use --lora-rank"),
    ("train --enable-lora", "refused", "use --weight-sync lora"),
    ("train --vllm_tensor_parallel_size 2", "refused", "use --rollout-num-gpus-per-engine"),
    ("train --eval_dataset x", "'s eval_dataset", "use --eval-prompt-data NAME FILE"),
    ("train --max-lora-rank 8", "refused", "use --lora-rank"),
    ("train --beta 0.1", "TRL's beta", "use --use-kl-loss --kl-loss-coef --kl-loss-type k3"),
    ("dpo --beta 0.1", "TRL's beta", "use --dpo-beta"),
    ("train --loss_type dapo", "TRL's loss_type", "use --calculate-per-token-loss"),
    ("train --loss-type dapo", "'dapo' is not one of policy_loss", "its meaning"),
    ("train --learning_rate 1e-6", "TRL's learning_rate", "use --lr"),
    ("train --vllm_enable_sleep_mode", "refused", "--offload-rollout"),
    ("train --vllm_mode colocate", "TRL's vllm_mode", "use --colocate"),
    ("serve --tensor_parallel_size 2", "the trainer's is", "use --rollout-num-gpus-per-engine"),
    ("serve --tensor-parallel-size 2", "the trainer's is", "use --rollout-num-gpus-per-engine"),
    ("serve --training-steps 3", "refused", "leave it out"),  # not --num-rollout, which has no meaning there
    ("train --training-steps 3", "refused", "use --num-rollout"),
    ("serve --max-num-batched-tokens 3", "of vLLM, which needs a prefix", "use --vllm-max-num-batched-tokens"),
    ("serve --num_rollout_gpus 2", "unknown flag", "did you mean --rollout-num-gpus?"),
    ("train --no-release-train", "--release-train is refused", "leave it out: it is off"),
    ("train --no-use-kl-loss", "--use-kl-loss is off by default", "leave out both it and --use-kl-loss"),
    ("train --weight-bridge-mode shared_vllm", "refused", "use --weight-sync single-copy (shared_vllm)"),
    ("train data.train_files=x.parquet", "verl's data.train_files", "use --prompt-data"),
    ("train algorithm.adv_estimator=rloo", "verl's algorithm.adv_estimator", "use --advantage-estimator rloo"),
    ("train algorithm.adv_estimator=opo", "verl's algorithm.adv_estimator", "docs/migration.md lists"),
    ("train actor_rollout_ref.rollout.n=8", "verl's actor_rollout_ref.rollout.n", "use --n-samples-per-prompt"),
    ("train +trainer.n_gpus_per_node=8", "verl's trainer.n_gpus_per_node", "use --actor-num-gpus-per-node"),
    ("train actor_rollout_ref.actor.megatron.context_parallel_size=2", "verl's", "use --context-parallel-size"),
    ("train some.thing=3", "is not a flag", "a flag as two words"),
    ("train something", "'something' belongs to no flag", "quote values that contain spaces"),
    ("train --actor_learning_rate 1", "OpenRLHF's actor_learning_rate", "use --lr"),
    ("train --actor.eps_clip_low_high 0.2 0.3", "OpenRLHF's", "use --eps-clip --eps-clip-high"),
    ("train --contxt-parallel-size 2", "unknown flag", "did you mean --context-parallel-size?"),
    ("train --moe-permute-fusio 2", "the similar --moe-permute-fusion is", "leave it out"),
    ("train --rollout-num-gpu 1", "unknown flag", "did you mean --rollout-num-gpus?"),
    ("train --zzzzzzzzzz", "unknown flag", "`instep train --help` lists the flags"),
]


@pytest.mark.parametrize(
    "line,what,remedy", SAID, ids=lambda text: text if text.split()[0] in ("train", "serve") else ""
)
def test_what_is_said(line, what, remedy):
    command, *words = line.split()
    (problem,) = scan(words, command).problems
    assert what in problem.what and remedy in problem.remedy, problem
    for name in named_flags(problem.remedy):
        assert acts_in(command, find(name)) or f"{name}`" in problem.remedy, problem  # `instep train --help`


def test_a_flag_that_was_meant_is_not_missing_as_well(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    text = refusal("data.train_files=data.jsonl --num_generations 4", without="--prompt-data")
    assert "2 things are wrong" in text and "no prompts are named" not in text
    assert "--n-samples-per-prompt" in text and "--prompt-data" in text
    text = refusal("--model model", without="--hf-checkpoint")  # refused, with what is meant
    assert "use --hf-checkpoint" in text and "is not named" not in text
    text = refusal("--model model --hf-checkpoint nowhere", without="--hf-checkpoint")
    assert "2 things are wrong" in text and "no folder nowhere" in text


def test_no_suggestion_names_a_flag_of_another_command():
    misspelt = [f.replace("-", "_", 3) + "x" for f in ("--advantage-estimator", "--dpo-beta", "--n-samples-per-prompt")]
    for command in ("train", "sft", "dpo", "serve", "plan"):
        for word in misspelt:
            (problem,) = scan([word], command).problems
            for name in named_flags(problem.remedy.partition("`")[0]):
                assert acts_in(command, find(name)), (command, word, problem)
