"""Words as people type them: spelling, numbers, lists and paths are taken, or refused with the right form."""

from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.errors import ConfigError
from tests.command_line import argv, make_folder, refusal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


SPELLING = [
    ("--rollout-batchsize 4", "--rollout-batchsize", "did you mean --rollout-batch-size?"),
    ("-lr 3", "-lr", "did you mean --lr?"),
    ("--n-samples-per-promt 4", "--n-samples-per-promt", "did you mean --n-samples-per-prompt?"),
    ("--num-roll 4", "--num-roll", "did you mean --num-rollout?"),  # no abbreviation
    ("--completely-else", "--completely-else", "lists the flags"),
    ("--lr fast", "--lr", "'fast' is not a number"),
    ("--lr nan", "--lr", "'nan' is not a finite number"),
    ("--lr -1", "--lr", "'-1' must be at least 0"),
    ("--num-steps-per-rollout 1.5", "--num-steps-per-rollout", "'1.5' is not a whole number"),
    ("--rollout-temperature 0", "--rollout-temperature", "'0' must be at least 0.01 and at most 100"),
    ("--rollout-top-p 1.5", "--rollout-top-p", "must be above 0 and at most 1"),
    ("--eps-clip-c 1", "--eps-clip-c", "'1' must be above 1"),
    ("--vllm-max-model-len auto", "--vllm-max-model-len", "is neither a whole number nor one like 2k"),
    ("--vllm-max-model-len 0", "--vllm-max-model-len", "must be at least 1"),
    ("--engine-port 80", "--engine-port", "must be at least 1024"),
    ("--train-backend deepspeed", "--train-backend", "is not one of megatron, hf, fsdp"),
    ("--use-tis maybe", "--use-tis", "takes only true or false as value, but got 'maybe'"),
    ("--use-tis true false", "--use-tis", "takes only true or false as value, but got 'true false'"),
    ("--num-steps-per-rollout 1e-1", "--num-steps-per-rollout", "'1e-1' is not a whole number"),
    ("--rollout-stop-token-ids 1,,x", "--rollout-stop-token-ids", "'x' is not a whole number"),
    (
        "--prompt-data data.jsonl b.jsonl c.jsonl",
        "--prompt-data",
        "join the files by commas: data.jsonl,b.jsonl,c.jsonl",
    ),
    (
        "--eval-prompt-data data.jsonl data.jsonl",
        "--eval-prompt-data",
        "each file has a name before it: NAME FILE",
    ),
    ("--eval-prompt-data a data.jsonl b", "--eval-prompt-data", "each file has a name before it: NAME FILE"),
    ("--lr", "--lr", "needs a value (FLOAT)"),
    ("--lr 1 2", "the command line", "'2' belongs to no flag"),
    ("--rm-type maths", "--rm-type", "is not a built-in reward"),
    (
        "--custom-rm-path a/reward.py:f",
        "--custom-rm-path",
        "is a file: write reward.f, and add its folder to PYTHONPATH",
    ),
    ("--custom-rm-path my_reward.py", "--custom-rm-path", "is a file: write my_reward.my_function"),
    ("--custom-rm-path reward:f", "--custom-rm-path", "is not a dotted path"),
    ("--custom-rm-path no_such_module.f", "--custom-rm-path", "neither in this folder nor on PYTHONPATH"),
    ("--rollout-function-path vime.rollout.vllm_rollout.my_rollout", "vime", "docs/migration.md, 'Hooks'"),
    ("--spec", "--spec", "needs a value (MODULE NAME)"),
    ("--spec get_spec", "--spec", "is not a dotted path"),
    ("--spec my models get_spec", "--spec", "takes MODULE NAME, but got 3 values"),
    ("--spec no_such_module get_spec", "--spec", "neither in this folder nor on PYTHONPATH"),
    ("--spec slime_plugins.models.glm4 get_glm_spec", "slime_plugins", "docs/migration.md, 'Hooks'"),
    ("--attention-dropout 0.1", "--attention-dropout", "at most 0"),
    ("--apply-chat-template-kwargs {x", "--apply-chat-template-kwargs", "is not JSON"),
    ("--apply-chat-template-kwargs [1]", "--apply-chat-template-kwargs", "not an object"),
]


@pytest.mark.parametrize("extra,where,what", SPELLING, ids=lambda x: x.split()[0] if x.startswith("-") else "")
def test_spelling(extra, where, what):
    text = refusal(extra)
    assert where in text and what in text


TYPED = [
    (["--global-batch-size", "1.6e1"], "global_batch_size", 16),
    (["--global-batch-size=16.0"], "global_batch_size", 16),
    (["--global_batch_size", "16"], "global_batch_size", 16),
    (["--vllm_max_model_len=1e3"], "vllm_max_model_len", 1000),
    (
        ["--vllm_max_num_batched_tokens", "1e3"],
        "vllm_overrides",
        {"max_num_batched_tokens": ["--max-num-batched-tokens", "1000"]},
    ),
    (
        ["--vllm-cudagraph-capture-sizes", "1,2", "4"],
        "vllm_overrides",
        {"cudagraph_capture_sizes": ["--cudagraph-capture-sizes", "1", "2", "4"]},
    ),
    (
        ["--vllm-compilation_config.cudagraph_mode", "NONE"],
        "vllm_overrides",
        {"compilation_config.cudagraph_mode": ["--compilation-config.cudagraph_mode", "NONE"]},
    ),
    (["--rollout-shuffle", "true"], "rollout_shuffle", True),
    (["--rollout-shuffle", "--rollout_shuffle=False"], "rollout_shuffle", False),
    (["--disable-grpo-std-normalization", "no"], "grpo_std_normalization", True),
    (["--no-hook-trial=1"], "hook_trial", False),
    (["--no-hook-trial", "--no-hook-trial", "0"], "hook_trial", True),
    (
        ["--vllm-enable-prefix-caching", "false"],
        "vllm_overrides",
        {"enable_prefix_caching": ["--no-enable-prefix-caching"]},
    ),
    (["--no-offload-train", "false"], "no_offload_train", False),
    (["--offload-train", "--offload-train", "false"], "no_offload_train", True),
    (["--rollout-stop-token-ids", "1,2", "3, 4"], "rollout_stop_token_ids", [1, 2, 3, 4]),
    (["--rollout-stop-token-ids", "1", "--rollout-stop-token-ids", "2"], "rollout_stop_token_ids", [1, 2]),
    (["--recompute-modules", "mlp,layernorm"], "megatron_overrides", {"recompute_modules": ["mlp", "layernorm"]}),
    (["--advantage-estimator", "GRPO"], "advantage_estimator", "grpo"),
    (["--train-backend", "HF"], "train_backend", "hf"),
    (["--rm-type", "Math"], "rm_type", "math"),
    (["--custom-generate-function-path", "übung.mäße.f"], "custom_generate_function_path", "übung.mäße.f"),
    (["--rollout-stop", "\n"], "rollout_stop", ["\n"]),
    (["--rollout-stop", "a,b", " ", "--rollout-stop=--end"], "rollout_stop", ["a,b", " ", "--end"]),
    (["--hf-checkpoint=~/model"], "hf_checkpoint", "HOME/model"),
    (["--hf-checkpoint", "model "], "hf_checkpoint", "model"),
    (
        ["--prompt-data", "data.jsonl, ~/data.jsonl ,data.jsonl@[0:1],"],
        "prompt_data",
        "data.jsonl,HOME/data.jsonl,data.jsonl@[0:1]",
    ),
]


@pytest.mark.parametrize("words,name,value", TYPED, ids=[" ".join(words) for words, *_ in TYPED])
def test_what_is_typed_is_taken_as_it_is_meant(here, monkeypatch, words, name, value):
    monkeypatch.setenv("HOME", str(here))
    Path("übung.py").touch()
    monkeypatch.syspath_prepend(here)
    found = getattr(parse(argv() + words), name)
    assert found == (value.replace("HOME", str(here)) if isinstance(value, str) else value)


def test_two_characters_are_no_newline():
    """They stay what they are: a regular expression or LaTeX may hold them."""
    args = parse([*argv(), "--rollout-stop", "\\n", "\\theta"])
    assert args.rollout_stop == ["\\n", "\\theta"] and any("$'\\n' in bash" in note for note in args.notes)
    assert not any("backslash" in note for note in parse([*argv(), "--rollout-stop", "\n", "\\\\", "\\alpha"]).notes)


def test_several_evaluation_sets():
    Path("b.jsonl").write_text(Path("data.jsonl").read_text())
    sets = "--eval-prompt-data data.jsonl@[0:1] --eval-prompt-data two b.jsonl three data.jsonl --eval-interval 1"
    found = [(dataset.name, dataset.path) for dataset in parse(argv(sets)).eval_datasets]
    assert found == [("data", "data.jsonl@[0:1]"), ("two", "b.jsonl"), ("three", "data.jsonl")]


@pytest.mark.parametrize("word", ["", " "])
def test_an_unset_shell_variable(word):
    with pytest.raises(ConfigError, match="unset shell variable"):
        parse([*argv(without="--prompt-data"), "--prompt-data", word])
