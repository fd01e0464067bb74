"""The command line: one table, one parse, one error for everything that is wrong."""

import ast
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from instep.arguments import RUNTIME_ATTRIBUTES, Args, parse
from instep.arguments.help import flags_markdown, format_help
from instep.arguments.megatron import megatron_table
from instep.arguments.table import GROUPS, find, nearest, own_flags, passed_through
from instep.errors import ConfigError

ROOT = Path(__file__).parents[2]

# Names that slime's command line has (223 of its core, 6 of its engine layer).
SLIME = """
--actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --allgather-cp --apply-chat-template
--apply-chat-template-kwargs --async-save --balance-by-flops --balance-data --buffer-filter-path
--calculate-per-token-loss --check-weight-update-equal --ci-disable-kl-checker --ci-load-grad-norm
--ci-save-grad-norm --ci-test --ci-train-rollout-logprob-abs-diff-threshold --clip-grad --colocate
--custom-advantage-function-path --custom-config-path --custom-convert-samples-to-train-data-path
--custom-eval-rollout-log-function-path --custom-generate-function-path --custom-loss-function-path
--custom-megatron-before-log-prob-hook-path --custom-megatron-before-train-step-hook-path
--custom-megatron-init-path --custom-model-provider-path --custom-pg-loss-reducer-function-path
--custom-reward-post-process-path --custom-rm-path --custom-rollout-log-function-path --custom-tis-function-path
--custom-update-weight-post-write-path --data-pad-size-multiplier --data-source-path --debug-rollout-only
--debug-train-only --disable-compute-advantages-and-returns --disable-grpo-std-normalization
--disable-rewards-normalization --disable-rollout-global-dataset --disable-wandb-random-suffix
--distributed-backend --distributed-timeout-minutes --dump-details --dynamic-sampling-filter-path
--enable-mtp-training --entropy-coef --eps-clip --eps-clip-c --eps-clip-high --eval-config --eval-function-path
--eval-input-key --eval-interval --eval-label-key --eval-max-context-len --eval-max-prompt-len
--eval-max-response-len --eval-min-new-tokens --eval-prompt-data --eval-reward-key --eval-temperature
--eval-tool-key --eval-top-k --eval-top-p --fetch-trajectory-retry-times --freeze-indexer
--freeze-params-name-list --gamma --get-mismatch-metrics --global-batch-size --group-rm --hf-checkpoint
--http-proxy --input-key --keep-old-actor --kl-coef --kl-loss-coef --kl-loss-type --label-key --lambd --load
--load-debug-rollout-data --load-debug-rollout-data-subsample --load-forge-rollout-data --log-correct-samples
--log-multi-turn --log-passrate --log-probs-chunk-size --log-probs-max-tokens-per-gpu --log-reward-category
--loss-mask-type --loss-type --lr --mask-offpolicy-in-partial-rollout --max-tokens-per-gpu
--megatron-config-path --megatron-deepgemm-forward-layers --megatron-deepgemm-forward-modules
--megatron-deepgemm-moe-forward-layers --megatron-deepgemm-moe-forward-modules --memory-recorder
--memory-snapshot-dir --memory-snapshot-num-steps --metadata-key --micro-batch-size --min-batch-collection-ratio
--model-name --mtp-loss-scaling-factor --mtp-num-layers --multimodal-keys --n-samples-per-eval-prompt
--n-samples-per-prompt --no-save-optim --normalize-advantages --num-critic-only-steps --num-epoch
--num-gpus-per-node --num-rollout --num-steps-per-rollout --offload --offload-rollout --offload-train
--only-train-params-name-list --opd-kl-coef --opd-teacher-ckpt-step --opd-teacher-load --opd-type --opsm-delta
--over-sampling-batch-size --padded-vocab-size --partial-rollout --prefill-num-servers --profile-target
--prompt-data --qwen-gdn-backend --recompute-loss-function --record-memory-history --ref-ckpt-step --ref-load
--ref-update-interval --release-train --reset-optimizer-states --reward-key --rm-type --rm-url
--rollout-all-samples-process-path --rollout-batch-size --rollout-buffer-url --rollout-data-postprocess-path
--rollout-data-transport --rollout-external-engine-addrs --rollout-function-path
--rollout-health-check-first-wait --rollout-health-check-interval --rollout-health-check-timeout
--rollout-max-context-len --rollout-max-prompt-len --rollout-max-response-len --rollout-num-gpus
--rollout-num-gpus-per-engine --rollout-sample-filter-path --rollout-sample-hook-path --rollout-seed
--rollout-shuffle --rollout-skip-special-tokens --rollout-stop --rollout-stop-token-ids --rollout-task-type
--rollout-temperature --rollout-top-k --rollout-top-p --save --save-debug-rollout-data --save-debug-train-data
--save-hf --save-interval --seed --sglang-config --sglang-router-ip --sglang-router-port
--sglang-router-request-timeout-secs --sglang-server-concurrency --skip-eval-before-train --start-rollout-id
--tb-experiment-name --tb-project-name --tis-clip --tis-clip-low --tool-key --train-backend --train-env-vars
--update-weight-buffer-size --update-weight-delta-checksum --update-weight-delta-encoding
--update-weight-disk-dir --update-weight-disk-keep-files --update-weight-local-checkpoint-dir
--update-weight-mode --update-weight-transport --update-weights-interval --use-distributed-post
--use-dynamic-batch-size --use-fault-tolerance --use-kl-loss --use-opd --use-opsm --use-rollout-entropy
--use-rollout-logprobs --use-rollout-routing-replay --use-routing-replay --use-stateless-adam --use-tensorboard
--use-tis --use-unbiased-kl --use-wandb --value-clip --wandb-always-use-train-step --wandb-dir --wandb-group
--wandb-host --wandb-key --wandb-mode --wandb-project --wandb-run-id --wandb-team
"""

# Names that the documents of vime, slime, Atropos and TRL show.
SEEDS = """
--actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --apply-chat-template --balance-abs-threshold
--batch-size --benchmark --calculate-per-token-loss --ckpt-format --ckpt-step --colocate --context-length
--context-parallel-size --critic-load --critic-lr --critic-lr-warmup-iters --critic-num-gpus-per-node
--critic-num-nodes --critic-save --custom-generate-function-path --custom-megatron-before-log-prob-hook-path
--custom-megatron-before-train-step-hook-path --custom-megatron-init-path --custom-rm-path --data-parallel-size
--disable-bias-linear --dp-size --dtype --enable-deepep-moe --enable-dp-attention --enable-ep-moe
--enable-expert-parallel --enable-lora --enable-prefix-caching --enforce-eager --env.tokenizer_name
--env.use_wandb --eps-clip --eval-function-path --expert-model-parallel-size --expert-tensor-parallel-size
--ffn-hidden-size --gpu-memory-utilization --group-query-attention --hf-checkpoint --hidden-size --host
--input-key --kl-coef --kv-channels --label-key --load --log-level --lora-alpha --lora-r --lr --max-lora-rank
--max-model-len --max-positional-embedding --megatron-config-path --mem-fraction-static --model --model-name
--model-path --n-samples-per-prompt --norm-epsilon --normalization --normalize-advantages --num-attention-heads
--num-critic-only-steps --num-layers --num-query-groups --openai.api_key --openai.base_url --openai.model_name
--openai.server_type --pipeline-model-parallel-size --pipeline-parallel-size --port --prefill-num-servers
--qk-layernorm --recompute-granularity --recompute-method --recompute-num-layers --ref-load --revision
--rollout-function-path --rollout-num-gpus --rollout-num-gpus-per-engine --rotary-base
--router-balance-abs-threshold --router-policy --router-request-timeout-secs --save --save-path --seq-length
--sequence-parallel --sglang-context-length --sglang-dp-size --sglang-enable-deepep-moe
--sglang-enable-dp-attention --sglang-enable-ep-moe --sglang-mem-fraction-static --sglang-router-ip
--sglang-router-port --sglang-tp-size --single-copy --slurm --swiglu --tensor-model-parallel-size
--tensor-parallel-size --tp-size --train-backend --trainer-rank --training-steps
--use-rotary-position-embeddings --use-tis --use-wandb --value-clip --vllm-config --vllm-config-path
--vllm-data-parallel-size --vllm-enable-expert-parallel --vllm-gpu-memory-utilization --vllm-max-model-len
--vllm-port --vllm-restart-interval --vllm-router-ip --vllm-router-port --vocab-size
--weight-bridge-mode --world-size
"""

# Defaults of slime, for those of its flags that act here and have one.
SLIME_DEFAULTS = """
--actor-num-nodes=1 --actor-num-gpus-per-node=8 --rollout-num-gpus-per-engine=1 --rollout-temperature=1.0
--rollout-top-p=1.0 --rollout-top-k=-1 --rollout-skip-special-tokens=False --rollout-shuffle=False
--rollout-seed=42 --partial-rollout=False --mask-offpolicy-in-partial-rollout=False
--rollout-sample-hook-path=[] --disable-rollout-global-dataset=True --apply-chat-template=False
--apply-chat-template-kwargs={} --input-key=input --metadata-key=metadata --tool-key=tools --micro-batch-size=1
--balance-data=False --use-dynamic-batch-size=False --skip-eval-before-train=False --n-samples-per-eval-prompt=1
--no-save-optim=False --seed=1234 --clip-grad=1.0 --calculate-per-token-loss=False --lr=1e-06 --eps-clip=0.2
--kl-coef=0.0 --loss-type=policy_loss --kl-loss-type=k1 --advantage-estimator=grpo --use-kl-loss=False
--kl-loss-coef=0.0 --use-unbiased-kl=False --entropy-coef=0.0 --normalize-advantages=False
--disable-grpo-std-normalization=True --disable-rewards-normalization=True --use-rollout-logprobs=False
--use-tis=False --tis-clip=2.0 --tis-clip-low=0 --use-opsm=False --opsm-delta=0.0001
--use-wandb=False
--use-tensorboard=False --group-rm=False --loss-mask-type=qwen
--train-backend=megatron
"""

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a data file and something that looks like a checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    Path("model/model.safetensors").write_bytes(b"0")
    return tmp_path


BASE = {
    "--hf-checkpoint": "model",
    "--prompt-data": "data.jsonl",
    "--rollout-batch-size": "4",
    "--num-rollout": "3",
    "--rm-type": "math",
    "--actor-num-gpus-per-node": "1",
}


def argv(extra: str = "", without: str = "") -> list[str]:
    base = [word for flag, value in BASE.items() if flag not in without.split() for word in (flag, value)]
    return base + extra.split()


def refusal(extra: str = "", without: str = "", command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv(extra, without), command)
    return str(caught.value)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_flag_of_slime_and_of_the_seeds_is_in_the_table():
    assert len(SLIME.split()) == 229
    assert len(SEEDS.split()) > 120
    assert [name for name in SLIME.split() if name not in own_flags()] == []
    assert [name for name in SEEDS.split() if find(name) is None] == []


def test_defaults_are_slimes():
    assert len(SLIME_DEFAULTS.split()) > 40
    for pair in SLIME_DEFAULTS.split():
        name, default = pair.split("=")
        ours = own_flags()[name].default
        assert str(ours) == default or float(ours) == float(default), name
    assert own_flags()["--n-samples-per-prompt"].default == 8  # slime's 1 makes GRPO train on nothing


def test_records_are_well_formed():
    names = [name for group in GROUPS for flag in group.flags for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    attributes = [flag.attribute for group in GROUPS for flag in group.flags]
    assert len(attributes) == len(set(attributes))
    for group in GROUPS:
        for flag in group.flags:
            assert flag.help if flag.status == "acts" else flag.note, flag.name
            assert set(flag.seeds) <= set("VRSCATM"), flag.name
            if flag.choices and flag.default is not None:
                assert flag.default in flag.choices, flag.name


def test_instead_names_flags_that_exist():
    for flag in [*own_flags().values(), *megatron_table()]:
        for word in flag.instead.replace(",", " ").split():
            if word.startswith("--"):
                assert find(word) is not None, (flag.name, word)


def test_megatron_table_is_the_whole_command_line():
    table = megatron_table()
    assert len(table) == 651
    by_name = {flag.name: flag for flag in table}
    assert by_name["--adam-beta2"].default == 0.999
    assert by_name["--recompute-granularity"].choices == ("full", "selective")
    assert by_name["--no-rope-fusion"].constant is False
    assert by_name["--tokenizer-type"].status == "refused"
    assert by_name["--num-experts"].status == "later"


def test_flags_that_pass_through_are_fields_of_megatron_core():
    spec = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    fields = set()
    for name in ("model_parallel_config", "transformer/transformer_config", "optimizer/optimizer_config") + (
        "distributed/distributed_data_parallel_config",
    ):  # read, not imported: that takes a quarter of a minute
        tree = ast.parse((Path(spec.origin).parent / f"{name}.py").read_text())
        fields |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node.simple}
    acting = {flag.attribute for flag in passed_through().values() if flag.status == "acts"}
    assert len(acting) > 30
    assert acting <= fields


def test_docs_are_made_from_the_table():
    assert (ROOT / "docs/arguments.md").read_text() == flags_markdown(), (
        "python -m instep.arguments.help > docs/arguments.md"
    )


def test_built_in_rewards_are_those_of_the_rollout():
    from instep.arguments.reward import RULES
    from instep.rollout.rewards import dispatch

    assert RULES == dispatch.RULES


# ---- parsing ---------------------------------------------------------------------------------------------------------


def test_a_minimal_command_line_and_what_follows_from_it():
    args = parse(argv())
    assert args.command == "train" and args.run_dir == "runs/train"
    assert (args.global_batch_size, args.num_steps_per_rollout) == (32, 1)
    assert (args.world_size, args.dp_size, args.rollout_num_gpus, args.rollout_num_engines) == (1, 1, 1, 1)
    assert args.eps_clip_high == args.eps_clip == 0.2
    assert args.over_sampling_batch_size == 4
    assert args.eval_function_path == args.rollout_function_path
    assert args.eval_datasets == [] and args.megatron_overrides == {}
    assert args.rewards_normalization and args.grpo_std_normalization and args.rollout_global_dataset


def test_values_and_their_types():
    args = parse(
        argv(
            "--lr=2e-5 --rollout-top-k -1 --rollout-stop a b --rollout-stop-token-ids 1 2 --use-tis --tis-clip 3 "
            "--rollout-sample-hook-path json.dumps --rollout-sample-hook-path json.loads --train-backend fsdp --bf16 "
            "--disable-grpo-std-normalization --num-steps-per-rollout 4"
        )
        + ["--apply-chat-template-kwargs", '{"enable_thinking": false}']
    )
    assert args.lr == 2e-5 and args.rollout_top_k == -1
    assert args.rollout_stop == ["a", "b"] and args.rollout_stop_token_ids == [1, 2]
    assert args.use_tis is True and args.tis_clip == 3.0
    assert args.rollout_sample_hook_path == ["json.dumps", "json.loads"]
    assert args.train_backend == "hf" and args.precision == "bf16"
    assert args.grpo_std_normalization is False
    assert args.global_batch_size == 8
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert own_flags()["--rollout-sample-hook-path"].default == []  # defaults are copied, not shared


def test_the_last_of_two_values_counts():
    assert parse(argv("--lr 1e-5 --lr 1e-4")).lr == 1e-4


def test_megatron_flags_are_handed_on_only_when_given():
    args = parse(
        argv("--overlap-grad-reduce --no-rope-fusion --init-method-std 0.01 --recompute-modules mlp core_attn")
    )
    assert args.megatron_overrides == {
        "overlap_grad_reduce": True,
        "apply_rope_fusion": False,
        "init_method_std": 0.01,
        "recompute_modules": ["mlp", "core_attn"],
    }


def test_the_seeds_model_script_is_accepted_and_checked():
    script = (
        "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --swiglu --vocab-size 300 --disable-bias-linear "
        "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm "
        "--normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings --rotary-base 10000"
    )
    assert parse(argv(script)).num_layers == 4
    text = refusal(script.replace("--num-layers 4", "--num-layers 36") + " --untie-embeddings-and-output-weights")
    assert "--num-layers: is 36, but config.json says 4" in text
    assert "--untie-embeddings-and-output-weights: is True, but config.json says False" in text


def test_sft_shares_the_parser():
    args = parse(argv(without="--rm-type"), "sft")
    assert (args.loss_type, args.n_samples_per_prompt, args.rollout_num_gpus, args.rollout_num_engines) == (
        "sft_loss",
        1,
        0,
        0,
    )
    assert args.global_batch_size == 4 and args.run_dir == "runs/sft"
    assert args.rollout_function_path == "instep.rollout.sft_rollout.generate_rollout"
    text = refusal("--n-samples-per-prompt 4 --eval-interval 2 --apply-chat-template --use-tis", command="sft")
    for flag in ("--n-samples-per-prompt", "--eval-interval", "--apply-chat-template", "--use-tis"):
        assert f" {flag}: " in text
    assert "but sft trains sft_loss" in refusal("--loss-type policy_loss", command="sft")


# ---- what is wrong on the command line itself ------------------------------------------------------------------------

SPELLING = [
    ("--rollout-batchsize 4", "--rollout-batchsize", "did you mean --rollout-batch-size?"),
    ("--rollout_max_response_len 4", "--rollout_max_response_len", "did you mean --rollout-max-response-len?"),
    ("-lr 3", "-lr", "did you mean --lr?"),
    ("--n-samples-per-promt 4", "--n-samples-per-promt", "did you mean --n-samples-per-prompt?"),
    ("--num-roll 4", "--num-roll", "did you mean --num-rollout?"),  # no abbreviation
    ("--completely-else", "--completely-else", "lists the flags"),
    ("--lr fast", "--lr", "'fast' is not a number"),
    ("--lr nan", "--lr", "'nan' is not a finite number"),
    ("--lr -1", "--lr", "'-1' must be at least 0"),
    ("--num-steps-per-rollout 1.5", "--num-steps-per-rollout", "'1.5' is not a whole number"),
    ("--rollout-temperature 0", "--rollout-temperature", "'0' must be above 0"),
    ("--rollout-top-p 1.5", "--rollout-top-p", "must be above 0 and at most 1"),
    ("--eps-clip-c 1", "--eps-clip-c", "'1' must be above 1"),
    ("--vllm-max-model-len auto", "--vllm-max-model-len", "is neither a whole number nor one like 2k"),
    ("--vllm-max-model-len 0", "--vllm-max-model-len", "must be at least 1"),
    ("--engine-port 80", "--engine-port", "must be at least 1024"),
    ("--train-backend deepspeed", "--train-backend", "is none of megatron, hf, fsdp"),
    ("--use-tis true", "--use-tis", "takes no value, but got 'true'"),
    ("--lr", "--lr", "needs a value (FLOAT)"),
    ("--lr 1 2", "the command line", "'2' belongs to no flag"),
    ("--rm-type maths", "--rm-type", "is no built-in reward"),
    ("--custom-rm-path reward.py:f", "--custom-rm-path", "is no dotted path"),
    ("--custom-rm-path no_such_module.f", "--custom-rm-path", "neither in this folder nor on PYTHONPATH"),
    ("--attention-dropout 0.1", "--attention-dropout", "at most 0"),
    ("--apply-chat-template-kwargs {x", "--apply-chat-template-kwargs", "is not JSON"),
    ("--apply-chat-template-kwargs [1]", "--apply-chat-template-kwargs", "not an object"),
]


@pytest.mark.parametrize("extra,where,what", SPELLING, ids=lambda x: x.split()[0] if x.startswith("-") else "")
def test_spelling(extra, where, what):
    text = refusal(extra)
    assert where in text and what in text


def test_an_unset_shell_variable():
    with pytest.raises(ConfigError, match="unset shell variable"):
        parse([*argv(without="--prompt-data"), "--prompt-data", ""])


NOT_ACTING = [
    ("--offload", "later", "memory work"),
    ("--use-distributed-post", "later", "one way"),
    ("--sglang-context-length 5", "refused", "use --vllm-max-model-len"),
    ("--sglang-anything", "refused", "use the --vllm- flag"),
    ("--mem-fraction-static 0.5", "refused", "use --vllm-gpu-memory-utilization"),
    ("--memory-recorder", "later", "debugging"),
    ("--context-parallel-size 2", "later", "context parallelism"),
    ("--num-experts 8", "later", "mixture-of-experts"),
    ("--fp8-format hybrid", "later", "Transformer Engine"),
    ("--use-torch-fsdp2", "refused", "use --train-backend hf"),
    ("--vision-pretraining", "refused", "not honoured by instep's trainer"),
    ("--train-iters 5", "refused", "use --num-rollout"),
    ("--weight-bridge-mode none", "later", "Atropos"),
    ("--openai.base_url x", "later", "Atropos"),
    ("--http-proxy x", "refused", "read by nobody"),
]


@pytest.mark.parametrize("extra,status,why", NOT_ACTING, ids=lambda x: x.split()[0] if x.startswith("-") else "")
def test_flags_that_do_not_act_say_why(extra, status, why):
    text = refusal(extra)
    assert f"{status}: " in text and why in text and extra.split()[0] in text


def test_every_flag_that_does_not_act_is_an_error():
    flags = {flag.name for flag in [*own_flags().values(), *passed_through().values()] if flag.status != "acts"}
    assert len(flags) > 500
    with pytest.raises(ConfigError) as caught:
        parse([*argv(), *sorted(flags)])
    text = str(caught.value)
    assert f"{len(flags)} things are wrong" in text
    assert all(f" {name}: " in text for name in flags)


def test_everything_wrong_is_told_at_once_and_each_thing_once():
    text = refusal(
        "--rollout-batch-size x --global-batch-size 7 --offload --nonsense --lr -5 --kl-coef 1 --kl-loss-coef 1"
    )
    assert "6 things are wrong" in text  # the unreadable batch size hides its quotient with 7
    assert text.count("--rollout-batch-size") == 1
    assert "exit" not in text and "Traceback" not in text
    text = refusal("--hf-checkpont model", without="--hf-checkpoint")
    assert "did you mean --hf-checkpoint?" in text and "is required" not in text


def test_nearest_prefers_flags_that_act():
    assert nearest("--rollout-num-gpu") == "--rollout-num-gpus"
    assert nearest("--zzzzzzzzzz") == ""


# ---- values that contradict each other -------------------------------------------------------------------------------

CONTRADICTIONS = [
    ("", "--hf-checkpoint", "the Hugging Face folder of the model"),
    ("", "--prompt-data", "is required"),
    ("", "--rollout-batch-size", "is required"),
    ("", "--num-rollout", "is required"),
    ("", "--rm-type", "no reward is named"),
    ("--num-epoch 2", "", "give one of the two"),
    ("--start-rollout-id 4", "", "is beyond --num-rollout 3"),
    ("--n-samples-per-prompt 1", "", "a group of one"),
    ("--global-batch-size 7", "", "use 4 or 8"),
    ("--num-steps-per-rollout 3", "", "use 2 or 4"),
    ("--global-batch-size 16 --num-steps-per-rollout 4", "", "16 x 4 steps = 64, but 4 prompts x 8 samples = 32"),
    ("--micro-batch-size 3", "", "use 30 or 33"),
    ("--actor-num-gpus-per-node 3", "--actor-num-gpus-per-node", "3 data-parallel ranks"),
    ("--use-dynamic-batch-size", "", "needs --max-tokens-per-gpu"),
    ("--max-tokens-per-gpu 100", "", "has no effect without --use-dynamic-batch-size"),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 9 --micro-batch-size 2", "", "has no effect with"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "", "the KL counts twice"),
    ("--kl-loss-coef 0.1", "", "has no effect without --use-kl-loss"),
    ("--use-unbiased-kl", "", "has no effect without --use-kl-loss"),
    ("--ref-update-interval 2", "", "there is no reference without a KL"),
    ("--use-tis --use-rollout-logprobs", "", "nothing to correct"),
    ("--use-tis --tis-clip-low 3", "", "is above --tis-clip"),
    ("--tis-clip 3", "", "has no effect without --use-tis"),
    ("--mask-offpolicy-in-partial-rollout", "", "has no effect without --partial-rollout"),
    ("--eps-clip 1.5", "", "would never clip below"),
    ("--disable-rewards-normalization --disable-grpo-std-normalization", "", "no std to leave out"),
    ("--rollout-max-context-len 10 --rollout-max-prompt-len 10", "", "no room for a response"),
    ("--vllm-max-model-len 10 --rollout-max-response-len 10", "", "no room for a prompt"),
    ("--rollout-top-k 0", "", "keeps no token"),
    ("--over-sampling-batch-size 3", "", "use at least 4"),
    ("--rm-type remote_rm", "--rm-type", "give --rm-url"),
    ("--group-rm", "", "needs a reward that takes lists"),
    ("--loss-type sft_loss", "", "run `instep sft`"),
    ("--save-interval 2", "", "no folder to save to"),
    ("--no-save-optim", "", "has no effect without --save"),
    ("--ckpt-step 2", "", "give --load"),
    ("--ref-ckpt-step 2", "", "give --ref-load"),
    ("--finetune", "", "give --load"),
    ("--load data.jsonl", "", "data.jsonl is a file"),
    ("--num-epoch 2 --disable-rollout-global-dataset", "--num-rollout", "give --num-rollout"),
    ("--lr-warmup-init 1", "", "is above --lr"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 9 --actor-num-gpus-per-node 4 --global-batch-size 2",
        "--actor-num-gpus-per-node",
        "2 samples a step for 4 data-parallel ranks",
    ),
    (
        "--eval-interval 2 --eval-config e.yaml --eval-prompt-data data.jsonl",
        "",
        "both name data sets",
    ),
    ("--save-hf out/{step}", "", "another field than {rollout_id}"),
    ("--save data.jsonl/x", "", "cannot write to"),
    ("--ref-load nowhere", "", "no folder nowhere"),
    ("--tensor-model-parallel-size 2", "", "does not divide 1 trainer ranks"),
    ("--train-backend hf --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", "", "shards with FSDP2 only"),
    ("--train-backend hf --overlap-grad-reduce", "", "only megatron-core has it"),
    ("--train-backend hf --use-distributed-optimizer", "", "leave it out"),
    ("--sequence-parallel", "", "needs tensor parallelism"),
    ("--recompute-granularity full", "", "needs a method"),
    ("--device cpu --actor-num-gpus-per-node 4096 --rollout-batch-size 512", "", "4096 trainer ranks on"),
    ("--rollout-backend embedded --rollout-num-gpus-per-engine 2", "", "the embedded engine uses one"),
    ("--vllm-router-ip 127.0.0.1", "", "one without the other"),
    ("--rollout-external-engine-addrs http://127.0.0.1:8000", "", "is no HOST:PORT"),
    ("--bf16 --precision fp32", "", "contradicts --precision fp32"),
    ("--min-lr 1", "", "is above --lr"),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "", "give one of the two"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "", "use less than 5"),
    ("--lr-decay-style WSD", "", "give --lr-wsd-decay-iters"),
    ("--adam-beta1 1", "", "must be below 1"),
    ("--eval-interval 2", "", "nothing to evaluate on"),
    ("--eval-prompt-data data.jsonl", "", "no evaluation would ever run"),
    ("--eval-interval 2 --eval-prompt-data a data.jsonl b", "", "they come in pairs"),
    ("--eval-interval 2 --eval-prompt-data a data.jsonl a data.jsonl", "", "is used 2 times"),
    (
        "--eval-interval 2 --eval-prompt-data a nowhere.jsonl",
        "",
        "no file nowhere.jsonl\n  where:  --eval-prompt-data, data set a",
    ),
    ("--wandb-project x", "", "has no effect without --use-wandb"),
]


@pytest.mark.parametrize("extra,without,what", CONTRADICTIONS, ids=lambda x: x.replace(" ", "_")[:60])
def test_contradictions(extra, without, what):
    text = refusal(extra, without)
    assert what in text
    assert "things are wrong" not in text  # one mistake, one problem


@pytest.mark.parametrize(
    "extra",
    [
        "--kl-coef 0.1 --kl-loss-type k3 --ref-update-interval 5",
        "--use-kl-loss",  # only reports
        "--global-batch-size 8 --micro-batch-size 4",
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096",
        "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 --sequence-parallel",
        "--train-backend hf --recompute-granularity full",
        "--save out --save-interval 2 --save-hf out/hf-{rollout_id} --no-save-optim",
        "--load not-yet-there --ckpt-step 3 --finetune",
        "--eval-interval 2 --eval-prompt-data data.jsonl@[0:1] --eval-temperature 0",
        "--seq-length 4096 --max-positional-embedding 4096 --attention-dropout 0.0",
        "--custom-rm-path json.dumps --group-rm",
        "--attention-softmax-in-fp32 --make-vocab-size-divisible-by 1 --ckpt-format torch_dist",
    ],
)
def test_what_goes_together_passes(extra):
    assert parse(argv(extra)).hf_checkpoint == "model"


def test_rows_may_name_their_reward():
    Path("data.jsonl").write_text('{"input": "1 + 1", "label": "2", "metadata": {"rm_type": "math"}}\n')
    assert parse(argv(without="--rm-type")).rm_type is None
    Path("data.parquet").write_bytes(b"PAR1")  # cannot be looked at without pyarrow
    assert parse(argv("--prompt-data data.parquet", "--rm-type")).rm_type is None
    assert "no reward is named" in refusal("--disable-rollout-global-dataset", "--prompt-data --rm-type")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_data_files():
    Path("empty.jsonl").write_text("")
    Path("data.csv").write_text("a,b\n")
    for name, what in (
        ("nowhere.jsonl", "no file nowhere.jsonl"),
        ("model", "model is a folder"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("data.csv", "neither .jsonl nor .parquet"),
        ("data.jsonl@[x]", "is no slice like @[0:100]"),
    ):
        assert what in refusal(f"--prompt-data {name}"), name
    assert parse(argv("--prompt-data data.jsonl@[-5:]")).prompt_data == "data.jsonl@[-5:]"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission():
    os.chmod("data.jsonl", 0)
    assert "cannot be read by this user" in refusal()


def test_checkpoints():
    for name, config, what in (
        ("m1", None, "has no config.json"),
        ("m2", "{broken", "config.json cannot be read"),
        ("m3", '{"is_encoder_decoder": true}', "encoder-decoder"),
        ("m4", '{"architectures": ["BertForMaskedLM"]}', "is no causal language model, but BertForMaskedLM"),
    ):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_bytes(b"0")
        if config is not None:
            Path(name, "config.json").write_text(config)
        assert what in refusal(f"--hf-checkpoint {name}"), name
    Path("model/model.safetensors").unlink()
    assert "holds no weights" in refusal()
    assert "no folder Qwen/Qwen3-0.6B" in refusal("--hf-checkpoint Qwen/Qwen3-0.6B")


def test_eval_flags():
    args = parse(argv("--eval-interval 2 --eval-prompt-data easy data.jsonl hard data.jsonl@[0:1]"))
    assert [(d.name, d.path) for d in args.eval_datasets] == [("easy", "data.jsonl"), ("hard", "data.jsonl@[0:1]")]
    assert parse(argv("--eval-interval 2 --eval-prompt-data data.jsonl")).eval_datasets[0].name == "data"
    assert (
        parse(argv("--eval-prompt-data data.jsonl --num-rollout 0", "--num-rollout")).eval_datasets[0].path
        == "data.jsonl"
    )


def test_eval_config():
    Path("eval.yaml").write_text(
        "eval:\n  defaults: {temperature: 0, max_response_len: 64}\n  datasets:\n"
        "    - {name: a, path: data.jsonl, rm_type: dapo, stop: [x]}\n"
        "    - {name: b, path: data.jsonl, temperature: 0.5, n_samples_per_eval_prompt: 4}\n"
    )
    flags = (
        "--rollout-top-p 0.8 --eval-top-p 0.9 --rollout-stop y --eval-label-key answer --reward-key acc "
        "--rollout-max-prompt-len 7 --n-samples-per-eval-prompt 2"
    )
    a, b = parse(argv(f"--eval-interval 2 --eval-config eval.yaml {flags}")).eval_datasets
    assert (a.name, a.temperature, a.max_response_len, a.rm_type, a.stop) == ("a", 0, 64, "dapo", ["x"])
    assert (b.temperature, b.max_response_len, b.n_samples_per_eval_prompt, b.rm_type) == (0.5, 64, 4, "math")
    assert (a.top_p, b.top_p, b.stop, b.label_key, b.reward_key) == (0.9, 0.9, ["y"], "answer", "acc")
    assert (a.max_prompt_len, a.n_samples_per_eval_prompt, a.metadata_overrides) == (7, 2, {})


@pytest.mark.parametrize(
    "text,what",
    [
        ("eval: [", "cannot be read"),
        ("datasets: []", "has no list eval.datasets"),
        ("eval: {datasets: []}", "has no list eval.datasets"),
        ("eval: {datasets: [{name: a}]}", "has no 'path'"),
        ("eval: {datasets: [{name: a, path: data.jsonl, temprature: 1}]}", "unknown key 'temprature'"),
        ("eval: {datasets: [{name: a, path: data.jsonl, temperature: hot}]}", "is not of the kind float"),
        ("eval: {datasets: [{name: a, path: data.jsonl, temperature: -1}]}", "temperature: -1 is not within 0 and inf"),
        ("eval: {datasets: [{name: a, path: data.jsonl, rm_type: maths}]}", "is no built-in reward"),
        ("eval: {datasets: [{name: a, path: nowhere.jsonl}]}", "no file nowhere.jsonl"),
        ("eval: {default: {}, datasets: [{name: a, path: data.jsonl}]}", "unknown key 'default'"),
        ("eval: {datasets: [{name: a, path: data.jsonl}, {name: a, path: data.jsonl}]}", "is used 2 times"),
    ],
)
def test_eval_config_that_is_wrong(text, what):
    Path("eval.yaml").write_text(text)
    assert what in refusal("--eval-interval 2 --eval-config eval.yaml")


# ---- Args and the view of hooks --------------------------------------------------------------------------------------


def test_the_key_of_wandb_is_never_shown():
    args = parse(
        argv("--use-wandb --wandb-key s3cr3t --wandb-project p --eval-interval 1 --eval-prompt-data data.jsonl")
    )
    assert args.wandb_key == "s3cr3t"
    view = args.view({})
    assert "s3cr3t" not in json.dumps(args.to_dict())
    assert "s3cr3t" not in repr(args) + repr(view) + str(pickle.dumps(view))
    assert args.to_dict()["wandb_project"] == "p"
    assert args.to_dict()["eval_datasets"][0]["path"] == "data.jsonl"
    with pytest.raises(AttributeError, match="secret"):
        _ = view.wandb_key
    with pytest.raises(ConfigError) as caught:
        parse([*argv("--use-wandb"), "--wandb-key", ""])
    assert "its value is empty" in str(caught.value)


def test_the_view_is_read_only_and_knows_the_run():
    args = parse(argv())
    runtime: dict = {}
    view = args.view(runtime)
    with pytest.raises(AttributeError, match="once the engines run"):
        _ = view.vllm_router_ip
    runtime.update(vllm_router_ip="127.0.0.1", vllm_router_port=8000, num_rollout=17)
    assert (view.vllm_router_ip, view.vllm_router_port, view.num_rollout) == ("127.0.0.1", 8000, 17)
    assert view.rollout_batch_size == 4 and view.hf_checkpoint == "model"
    for name in ("lr", "new_name"):
        with pytest.raises(AttributeError, match="cannot be set: hooks see the arguments read-only"):
            setattr(view, name, 1)
    with pytest.raises(AttributeError, match="cannot be set"):
        del view.lr
    assert args.lr == 1e-6
    with pytest.raises(ValueError, match="undeclared"):
        args.view({"anything": 1})
    assert set(RUNTIME_ATTRIBUTES) >= {"vllm_model_routers", "rollout_engine_urls"}


def test_missing_attributes_say_why():
    args = parse(argv())
    for holder in (args, args.view({})):
        with pytest.raises(AttributeError, match="--offload is later: comes with the memory work"):
            _ = holder.offload
        with pytest.raises(AttributeError, match="did you mean args.rollout_batch_size"):
            _ = holder.rollout_batchsize
        with pytest.raises(AttributeError, match="is args.vllm_router_ip here"):
            _ = holder.sglang_router_ip
        assert not hasattr(holder, "offload")


def test_args_and_views_survive_pickling():
    args = parse(argv("--overlap-grad-reduce"))
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, Args) and again == args and again.megatron_overrides == {"overlap_grad_reduce": True}
    view = pickle.loads(pickle.dumps(args.view({"num_rollout": 5})))
    assert view.num_rollout == 5 and view.lr == 1e-6 and "lr" in view and "lr" in dir(view)
    assert view.to_dict()["num_rollout"] == 5


@pytest.mark.alone
def test_no_torch_for_a_command_line():
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from instep.arguments import parse\n"
        "from instep.arguments.help import format_help\n"
        "text = format_help(); parse(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'aiohttp', 'megatron', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.perf_counter() - start)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *argv()], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


def test_help_shows_every_flag_that_acts():
    text = format_help()
    for flag in own_flags().values():
        assert (f"  {flag.name} " in text or f"  {flag.name}\n" in text) == (flag.status == "acts"), flag.name
    assert "Example:" in text and max(map(len, text.splitlines())) <= 120
    example = text[text.index("instep train --hf-checkpoint") :].replace("\\\n", " ").split()[2:]
    for name in ("models/tiny", "train.jsonl", "eval.jsonl"):
        path = Path(name)
        path.mkdir(parents=True) if name == "models/tiny" else path.write_text('{"prompt": []}\n')
    Path("models/tiny/config.json").write_text(json.dumps(CONFIG))
    Path("models/tiny/model.safetensors").write_bytes(b"0")
    assert parse(example).num_rollout == 50  # the example that help shows is right
