"""Values and files that do not go together: each mistake is one problem, found before anything is loaded."""

import json
import os
from pathlib import Path

import pytest

from instep.arguments import cluster
from instep.arguments.parse import parse
from instep.controller import device
from instep.errors import ConfigError
from tests.command_line import CONFIG, argv, make_folder, refusal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, monkeypatch)
    (folder / "e.yaml").write_text("eval: {datasets: [{name: a, path: data.jsonl, rm_type: f1}]}")
    return folder


CONTRADICTIONS = [
    ("", "--hf-checkpoint", "a model of the hub as ORG/NAME"),
    ("", "--prompt-data", "no prompts are named"),
    ("", "--rollout-batch-size", "size of a rollout is not given"),
    ("", "--num-rollout", "length of the run is not given"),
    ("", "--rm-type", "no reward is named"),
    ("--num-epoch 2", "", "give one of the two"),
    ("--start-rollout-id 4", "", "is beyond --num-rollout 3"),
    ("--n-samples-per-prompt 1", "", "a group of one"),
    ("--global-batch-size 7", "", "use 4 or 8"),
    ("--num-steps-per-rollout 3", "", "use 2 or 4"),
    ("--global-batch-size 16 --num-steps-per-rollout 4", "", "16 x 4 steps = 64, but 4 prompts x 8 samples = 32"),
    ("--micro-batch-size 3", "", "use 2 or 4"),
    ("--actor-num-gpus-per-node 2 --global-batch-size 1", "--actor-num-gpus-per-node", "use 2"),
    (
        "--actor-num-gpus-per-node 2 --micro-batch-size 5 --global-batch-size 1",
        "--actor-num-gpus-per-node",
        "multiple of 10",
    ),
    ("--actor-num-gpus-per-node 3", "--actor-num-gpus-per-node", "3 data-parallel ranks"),
    ("--use-dynamic-batch-size --device cpu --debug-rollout-only", "", "needs --max-tokens-per-gpu"),
    ("--max-tokens-per-gpu 100", "", "has no effect without --use-dynamic-batch-size"),
    ("--balance-by-flops --micro-batch-size 1 --device cpu", "", "has no effect without --use-dynamic-batch-size"),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 9 --micro-batch-size 2", "", "has no effect with"),
    ("--freeze-params-name-list a --only-train-params-name-list b", "", "contradicts --only-train-params-name-list"),
    ("--freeze-params-name-list a --train-backend hf --lora-rank 8", "", "--lora-rank trains only an adapter"),
    ("--freeze-params-name-list (", "", "is not a regular expression"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "", "the KL counts twice"),
    ("--kl-loss-coef 0.1", "", "has no effect without --use-kl-loss"),
    ("--use-unbiased-kl", "", "has no effect without --use-kl-loss"),
    ("--ref-update-interval 2", "", "there is no reference without a KL"),
    ("--use-tis --use-rollout-logprobs", "", "nothing to correct"),
    ("--use-tis --tis-clip-low 3", "", "--tis-clip-low above --tis-clip"),
    ("--tis-clip 3", "", "has no effect without --use-tis"),
    ("--mask-offpolicy-in-partial-rollout", "", "has no effect without --partial-rollout"),
    ("--eps-clip 1.5", "", "would never clip below"),
    ("--disable-rewards-normalization --disable-grpo-std-normalization", "", "no std to leave out"),
    ("--rollout-max-context-len 10 --rollout-max-prompt-len 10", "", "no room for a response"),
    ("--vllm-max-model-len 10 --rollout-max-response-len 10", "", "no room for a prompt"),
    ("--rollout-top-k 0", "", "keeps no token"),
    ("--over-sampling-batch-size 3", "", "use at least 4"),
    ("--rm-type remote_rm", "--rm-type", "give --rm-url"),
    ("--group-rm", "", "needs your own reward, which takes lists"),
    ("", "--label-key", "no column of labels is named\n  where:  --rm-type math\n  remedy: give --label-key"),
    ("--rm-type boxed_gpqa", "--label-key", "--rm-type boxed_gpqa"),
    ("--rm-type dapo", "", "no entry is named\n  where:  --rm-type dapo\n  remedy: give --reward-key score"),
    ("--rm-type dapo --reward-key points", "", "not points"),
    (
        "--rm-type random --eval-interval 1 --eval-config e.yaml",
        "--label-key",
        "no column of labels is named\n  where:  data set a, rm_type f1\n  remedy: give --eval-label-key",
    ),
    ("--rollout-stop-token-ids 299 300", "", "the model has 300 tokens, but not 300"),
    ("--rollout-batch-size 100000 --n-samples-per-prompt 1000", "", "100000000 samples per rollout, but at most"),
    ("--rollout-batch-size 99991 --global-batch-size 10", "", "use 8 or 99991"),
    ("--rollout-num-gpus 1000000", "", "must be at least 1 and at most 32768"),
    ("--actor-num-gpus-per-node 32 --rollout-num-gpus 32768", "", "32800 ranks or GPUs, but the limit is 32768"),
    ("--loss-type sft_loss", "", "run `instep sft`"),
    ("--save-interval 2", "", "no folder to save to"),
    ("--no-save-optim", "", "has no effect without --save"),
    ("--save out --ckpt-format torch --train-backend hf", "", "is a format of Megatron"),
    ("--save out --ckpt-format torch --async-save", "", "cannot be written in the background"),
    ("--ckpt-step 2", "", "give --load"),
    ("--ref-ckpt-step 2", "", "give --ref-load"),
    ("--finetune", "", "give --load"),
    ("--load data.jsonl", "", "data.jsonl is a file"),
    ("--num-epoch 2 --disable-rollout-global-dataset", "--num-rollout", "give --num-rollout"),
    ("--lr-warmup-init 1", "", "is above --lr"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 9 --actor-num-gpus-per-node 4 --global-batch-size 2",
        "--actor-num-gpus-per-node",
        "2 samples per step for 4 data-parallel ranks",
    ),
    (
        "--eval-interval 2 --eval-config e.yaml --eval-prompt-data data.jsonl",
        "",
        "both name data sets",
    ),
    ("--save-hf out/{epoch}", "", "another field than {rollout_id}"),
    ("--save data.jsonl/x", "", "cannot write to"),
    ("--ref-load nowhere", "", "no folder nowhere"),
    ("--tensor-model-parallel-size 2", "", "does not divide 1 trainer ranks"),
    ("--train-backend hf --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", "", "has no pipelines"),
    ("--num-virtual-stages-per-pipeline-rank 2", "", "needs a pipeline"),
    ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1", "", "say the same\n"),
    (
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 "
        "--global-batch-size 1",
        "",
        "use --global-batch-size 2 or more",
    ),
    ("--expert-model-parallel-size 2 --actor-num-gpus-per-node 2", "", "the model has no experts"),
    ("--context-parallel-size 2 --tensor-model-parallel-size 2", "", "TP 2 x PP 1 x CP 2 = 4 does not divide"),
    ("--train-backend hf --overlap-grad-reduce", "", "only megatron-core has it"),
    ("--train-backend hf --use-distributed-optimizer", "", "leave it out"),
    ("--train-backend hf --tensor-model-parallel-size 3 --actor-num-gpus-per-node 3", "", "the model's 4 heads"),
    ("--recompute-granularity full --recompute-method block", "", "needs a number of layers"),
    ("--recompute-method uniform", "", "full recomputation, which is off"),
    ("--recompute-granularity selective --recompute-num-layers 1", "", "not to selective"),
    ("--recompute-granularity full", "", "needs a method"),
    ("--device cpu --actor-num-gpus-per-node 4096 --rollout-batch-size 512", "", "4096 trainer ranks on"),
    ("--rollout-backend embedded --rollout-num-gpus-per-engine 2", "", "the embedded engine uses 1"),
    ("--vllm-router-ip 127.0.0.1", "", "only one is given"),
    (
        "--rollout-num-gpus 2 --prefill-num-servers 1 --pause-mode keep",
        "",
        "would be of the old weights after a sync\n  where:  --pause-mode keep with prefill and decode engines",
    ),
    ("--rollout-external-engine-addrs http://127.0.0.1:8000", "", "is not HOST:PORT"),
    ("--api-key-file nowhere", "", "no external engine, router or teacher is named"),
    ("--rollout-external-engine-addrs 127.0.0.1:80 --api-key-file nowhere", "", "cannot be read: No such file"),
    ("--rollout-external-engine-addrs 127.0.0.1:80 127.0.0.1:80", "", "127.0.0.1:80 is named twice"),
    ("--rollout-external-engine-addrs 10.0.0.1:80 --weight-sync shm", "", "10.0.0.1:80 cannot use this host's shared"),
    ("--bf16 --precision fp32", "", "contradicts --precision fp32"),
    ("--min-lr 1", "", "is above --lr"),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "", "give one of the two"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "", "use less than 5"),
    ("--lr-decay-style WSD", "", "give --lr-wsd-decay-iters"),
    ("--adam-beta1 1", "", "at most 0.999999"),
    ("--eval-interval 2", "", "nothing to evaluate on"),
    ("--eval-interval 2 --eval-prompt-data a data.jsonl b", "", "each file has a name before it"),
    ("--eval-interval 2 --eval-prompt-data a data.jsonl a data.jsonl", "", "is used 2 times"),
    (
        "--eval-interval 2 --eval-prompt-data a nowhere.jsonl",
        "",
        "no file nowhere.jsonl\n  where:  --eval-prompt-data, data set a",
    ),
    ("--wandb-project x", "", "has no effect without --use-wandb"),
    ("--critic-num-nodes 1", "", "there is no critic without PPO"),
    ("--critic-num-gpus-per-node 1", "", "there is no critic without PPO"),
]


MICRO, RANKS = "--micro-batch-size {}", "--actor-num-gpus-per-node 4 --global-batch-size {}"


@pytest.mark.parametrize("words,wrong", [(MICRO, 3), (MICRO, 5), (MICRO, 30), (MICRO, 64), (RANKS, 1), (RANKS, 2)])
def test_the_sizes_that_an_error_names_are_taken(words, wrong):
    without = "--actor-num-gpus-per-node" if words is RANKS else ""
    named = refusal(words.format(wrong), without).partition("remedy: use ")[2].partition(",")[0].split(" or ")
    for number in named:
        assert parse(argv(words.format(number), without)).global_batch_size


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
        "--rm-type dapo --reward-key acc",
        "--rollout-stop-token-ids 299",
        "--attention-softmax-in-fp32 --make-vocab-size-divisible-by 1 --ckpt-format torch_dist",
        "--ckpt-format torch --ref-load model",
        "--ckpt-format torch --save out",
    ],
)
def test_what_goes_together_passes(extra):
    assert parse(argv(extra)).hf_checkpoint == "model"


@pytest.mark.parametrize(
    "extra",
    [
        "--rm-type remote_rm --rm-url http://h:1",
        "--rm-type random",
        "--custom-rm-path json.dumps",
        "--custom-generate-function-path json.dumps",  # it may set labels, or rewards
        "--rollout-sample-hook-path json.dumps",
        "--data-source-path json.dumps",
        "--rollout-function-path json.dumps",
        "--num-rollout 0 --eval-interval 1 --eval-prompt-data data.jsonl --eval-label-key label",
    ],
)
def test_where_no_built_in_reward_reads_the_label_it_needs_no_column(extra):
    assert parse(argv(extra, "--label-key")).label_key is None


def test_lengths_beyond_the_models_context_are_said():
    Path("model/config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 64}))
    assert parse(argv("--rollout-max-response-len 63 --rollout-max-context-len 64")).notes == []
    notes = parse(argv("--rollout-max-response-len 64 --eval-max-response-len 99 --rollout-max-context-len 65")).notes
    assert [note.split()[:2] for note in notes] == [
        ["--rollout-max-response-len:", "64"],
        ["--eval-max-response-len:", "99"],
        ["--rollout-max-context-len:", "65"],
    ]
    assert all("exceeds the model's context of 64 tokens" in note for note in notes)


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
        ("data.jsonl@[x]", "cannot read the slice of"),
        (f"data.jsonl@[{'9' * 5000}:]", "cannot read the slice of"),
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
        ("m4", '{"architectures": ["BertForMaskedLM"]}', "is not a causal language model, but BertForMaskedLM"),
    ):
        Path(name).mkdir()
        Path(name, "model.safetensors").write_bytes(b"0")
        if config is not None:
            Path(name, "config.json").write_text(config)
        assert what in refusal(f"--hf-checkpoint {name}"), name
    Path("model/model.safetensors").unlink()
    assert "has no weights" in refusal()
    assert "no folder Qwen/Qwen3-0.6B" in refusal("--hf-checkpoint Qwen/Qwen3-0.6B")


def test_eval_flags():
    args = parse(argv("--eval-interval 2 --eval-prompt-data easy data.jsonl hard data.jsonl@[0:1]"))
    assert [(d.name, d.path) for d in args.eval_datasets] == [("easy", "data.jsonl"), ("hard", "data.jsonl@[0:1]")]
    assert parse(argv("--eval-interval 2 --eval-prompt-data data.jsonl")).eval_datasets[0].name == "data"
    assert (
        parse(argv("--eval-prompt-data data.jsonl --num-rollout 0", "--num-rollout")).eval_datasets[0].path
        == "data.jsonl"
    )


def test_an_evaluation_may_be_greedy():
    words = "--eval-interval 2 --eval-prompt-data data.jsonl --rollout-temperature 0.7"
    given, own = (parse(argv(f"{words}{more}")).eval_datasets[0] for more in (" --eval-temperature 0", ""))
    assert (given.temperature, own.temperature) == (0.0, 0.7)


def test_a_prompt_leaves_room_for_a_token():
    words = "--apply-chat-template --vllm-max-model-len 100 --rollout-max-response-len 10"
    assert parse(argv(words)).rollout_max_prompt_len == 99
    assert parse(argv(f"{words} --rollout-max-context-len 60")).rollout_max_prompt_len == 59
    assert parse(argv(f"{words} --rollout-max-prompt-len 20")).rollout_max_prompt_len == 20


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
        (
            "eval: {datasets: [{name: a, path: data.jsonl, temperature: -1}]}",
            "temperature: -1 must be at least 0 and at most 100",
        ),
        ("eval: {datasets: [{name: a, path: data.jsonl, rm_type: maths}]}", "is not a built-in reward"),
        ("eval: {datasets: [{name: a, path: nowhere.jsonl}]}", "no file nowhere.jsonl"),
        ("eval: {default: {}, datasets: [{name: a, path: data.jsonl}]}", "unknown key 'default'"),
        ("eval: {datasets: [{name: a, path: data.jsonl}, {name: a, path: data.jsonl}]}", "is used 2 times"),
    ],
)
def test_eval_config_that_is_wrong(text, what):
    Path("eval.yaml").write_text(text)
    assert what in refusal("--eval-interval 2 --eval-config eval.yaml")


def test_a_reward_of_ones_own_goes_before_a_rule():
    notes = parse(argv("--custom-rm-path examples.hooks.reward --rm-type math --label-key label")).notes
    assert notes == ["--rm-type math: is not used: --custom-rm-path computes the reward"]


def test_ranks_and_cores(monkeypatch):
    """On the CPUs of this host one copy of the model by default; at most two ranks share a core, which a note tells."""
    monkeypatch.setattr(cluster, "num_usable_cpus", lambda: 2)
    ranks = "--actor-num-gpus-per-node"

    def num_ranks(flags):
        return parse(argv(f"--device cpu {flags}", without=ranks)).world_size

    assert num_ranks("") == 1 and num_ranks("--tensor-model-parallel-size 2") == 2
    assert num_ranks("--cluster ray --rollout-batch-size 8 --weight-sync disk") == 8
    assert parse(argv(f"--device cpu {ranks} 2")).notes == []
    assert parse(argv(f"--device cpu {ranks} 4")).notes == [
        f"{ranks}: 4 trainer ranks on 2 CPU cores take turns: this is slow"
    ]
    assert "8 trainer ranks on 2 CPU cores" in refusal(f"--device cpu {ranks} 8")
    assert parse(argv(f"--device cuda {ranks} 8")).world_size == 8


def test_ranks_and_cores_are_compared_again_where_auto_means_the_cpu(monkeypatch):
    """Also for those who call Python: `instep train` itself reads the command line again."""
    monkeypatch.setattr(cluster, "num_usable_cpus", lambda: 2)
    monkeypatch.setattr(device, "device_here", lambda: "cpu")
    args = parse(argv("--actor-num-gpus-per-node 8"))
    with pytest.raises(ConfigError, match="8 trainer ranks on 2 CPU cores"):
        device.resolve_on_machine(args, with_engines=False)
