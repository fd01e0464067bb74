"""The command line: one parse, one error for everything that is wrong; what hooks see of it."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from instep.arguments import cluster
from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.args import RUNTIME_ATTRIBUTES, Args, Draft, Unreadable
from instep.arguments.help import format_help
from instep.arguments.parse import parse
from instep.cluster.placement import make_plan
from instep.engines.spec import Slot
from instep.errors import ConfigError
from tests.bounds import allowed
from tests.command_line import CONFIG, argv, make_folder, refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


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
            "--disable-grpo-std-normalization --num-steps-per-rollout 4 --sync-way disk"
        )
        + ["--apply-chat-template-kwargs", '{"enable_thinking": false}']
    )
    assert args.lr == 2e-5 and args.rollout_top_k == -1
    assert args.rollout_stop == ["a", "b"] and args.rollout_stop_token_ids == [1, 2]
    assert args.use_tis is True and args.tis_clip == 3.0
    assert args.rollout_sample_hook_path == ["json.dumps", "json.loads"]
    assert args.train_backend == "hf" and args.precision == "bf16" and args.weight_sync == "disk"
    assert args.grpo_std_normalization is False
    assert args.global_batch_size == 8
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert own_flags()["--rollout-sample-hook-path"].default == []  # defaults are copied, not shared


def test_the_last_of_two_values_counts():
    assert parse(argv("--lr 1e-5 --lr 1e-4")).lr == 1e-4


def test_megatron_flags_are_handed_on_only_when_given():
    args = parse(argv("--overlap-grad-reduce --no-bias-dropout-fusion --recompute-modules mlp"))
    assert args.megatron_overrides == {
        "overlap_grad_reduce": True,
        "bias_dropout_fusion": False,
        "recompute_modules": ["mlp"],
    }


@pytest.mark.parametrize(
    "flag",
    [
        *("--overlap-cpu-optimizer-d2h-h2d", "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads"),
        *("--no-pin-cpu-params", "--no-align-param-gather", "--no-gradient-accumulation-fusion"),
        *("--accumulate-allreduce-grads-in-fp32", "--no-check-for-nan-in-loss-and-grad"),
    ],
)
def test_what_changes_nothing_is_said(flag):
    args = parse(argv(f"--optimizer-cpu-offload {flag}"))
    assert not args.megatron_overrides and [n for n in args.notes if n.startswith(f"{flag}: changes nothing: ")]


def test_a_part_of_the_moments_in_host_memory_is_refused():
    assert "either all moments are in host memory, or no moments" in refusal("--optimizer-offload-fraction 0.5")
    assert parse(argv("--optimizer-cpu-offload --optimizer-offload-fraction 1.0")) == parse(
        argv("--optimizer-cpu-offload")
    )


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
    Path("model/config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen2"}))
    text = refusal("--qk-layernorm --add-qkv-bias --rotary-percent 0.5")
    assert "--qk-layernorm: is True, but config.json says False" in text and "--add-qkv-bias" not in text
    assert "--rotary-percent: is 0.5, but config.json says 1.0" in text


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
    text = refusal("--n-samples-per-prompt 4 --eval-interval 2 --apply-chat-template --use-tis", "--rm-type", "sft")
    for flag in ("--n-samples-per-prompt", "--eval-interval", "--apply-chat-template", "--use-tis"):
        assert f" {flag}: " in text
    more = "--critic-lr 1 --sapo-tau-pos 2 --eps-clip 2 --gamma 0.9 --disable-rewards-normalization"
    text = refusal(more, "--rm-type", "sft")  # what acts on rewards and policies only, whatever the estimator
    assert text.count("has no meaning for `instep sft`") == 5 and "5 things are wrong" in text
    assert "--disable-rewards-normalization" in text
    assert "but sft trains sft_loss" in refusal("--loss-type policy_loss", "--rm-type", "sft")


# ---- what is wrong on the command line itself ------------------------------------------------------------------------

NOT_ACTING = [
    ("--release-train", "refused", "live as long as the run"),
    ("--use-distributed-post", "refused", "through the controller"),
    ("--sglang-tp-size 2", "refused", "use --rollout-num-gpus-per-engine"),
    ("--sglang-anything --rollout-backend vllm", "refused", "use the --vllm- flag"),
    ("--mem-fraction-static 0.5", "refused", "use --vllm-gpu-memory-utilization"),
    ("--memory-recorder", "later", "memory snapshots of PyTorch"),
    ("--hybrid-context-parallel", "refused", "context-parallel ranks gather keys and values"),
    ("--overlap-moe-expert-parallel-comm", "later", "without overlap with computation"),
    ("--moe-enable-deepep", "refused", "not by DeepEP"),
    ("--fp8-format hybrid", "later", "Transformer Engine"),
    ("--use-torch-fsdp2", "refused", "use --train-backend hf"),
    ("--vision-pretraining", "refused", "that instep's trainer does not support"),
    ("--train-iters 5", "refused", "use --num-rollout"),
    ("--weight-bridge-mode none", "refused", "Atropos"),
    ("--openai.base_url x", "refused", "Atropos"),
    ("--http-proxy x", "refused", "slime never reads it"),
]


@pytest.mark.parametrize("extra,status,why", NOT_ACTING, ids=lambda x: x.split()[0] if x.startswith("-") else "")
def test_flags_that_do_not_act_say_why(extra, status, why):
    text = refusal(extra)
    assert f"{status}: " in text and why in text and extra.split()[0] in text


def test_every_flag_that_does_not_act_is_an_error():
    flags = {
        flag.name for flag in [*own_flags().values(), *passed_through().values()] if flag.status in ("later", "refused")
    }
    assert len(flags) > 500
    with pytest.raises(ConfigError) as caught:
        parse([*argv("--rollout-backend vllm"), *sorted(flags)])
    text = str(caught.value)
    assert f"{len(flags)} things are wrong" in text
    assert all(f" {name}: " in text for name in flags)


def test_everything_wrong_is_told_at_once_and_each_thing_once():
    text = refusal(
        "--rollout-batch-size x --global-batch-size 7 --release-train --nonsense --lr -5 --kl-coef 1 --kl-loss-coef 1"
    )
    assert "6 things are wrong" in text  # the unreadable batch size hides its quotient with 7
    assert text.count("--rollout-batch-size") == 1
    assert "exit" not in text and "Traceback" not in text
    text = refusal("--hf-checkpont model", without="--hf-checkpoint")
    assert "did you mean --hf-checkpoint?" in text and "is not named" not in text


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
        with pytest.raises(AttributeError, match="cannot be set: the arguments are read-only for hooks"):
            setattr(view, name, 1)
    with pytest.raises(AttributeError, match="cannot be set"):
        del view.lr
    assert args.lr == 1e-6
    assert set(RUNTIME_ATTRIBUTES) >= {"vllm_model_routers", "rollout_engine_urls"}


def test_arguments_are_frozen_and_copied_to_be_changed():
    args = parse(argv())
    for change in (lambda: setattr(args, "lr", 1.0), lambda: delattr(args, "lr")):
        with pytest.raises(AttributeError, match=r"args.lr cannot be set.*args.replace\(lr=value\)"):
            change()
    other = args.replace(lr=1.0, device="cpu")
    assert (args.lr, args.device, other.lr, other.device) == (1e-6, "auto", 1.0, "cpu")
    with pytest.raises(AttributeError, match="frozen"):
        other.lr = 2.0
    with pytest.raises(AttributeError, match="did you mean args.rollout_batch_size"):
        args.replace(rollout_batchsize=1)


def test_hooks_see_a_setting_that_the_run_has_tightened():
    runtime: dict = {}
    view = parse(argv()).view(runtime)
    assert view.rollout_max_context_len is None
    runtime["rollout_max_context_len"] = 64
    assert view.rollout_max_context_len == view.to_dict()["rollout_max_context_len"] == 64


def test_a_value_that_cannot_be_read_raises_where_it_is_read():
    """Also where it is hidden in what follows from it."""
    args = Draft({"lr"}, lr=1.0, min_lr=0.0)
    assert args.min_lr == 0.0 and args.replace(min_lr=2.0).min_lr == 2.0
    for holder in (args, args.replace(min_lr=2.0)):
        with pytest.raises(Unreadable):
            _ = holder.lr
    text = refusal("--tensor-model-parallel-size x --global-batch-size 12 --rollout-top-k 0 --sequence-parallel")
    assert "3 things are wrong" in text and "which 12 does not divide" in text and "keeps no token" in text


def test_missing_attributes_say_why():
    args = parse(argv())
    for holder in (args, args.view({})):
        with pytest.raises(AttributeError, match="--release-train is refused: the trainer's processes"):
            _ = holder.release_train
        with pytest.raises(AttributeError, match="did you mean args.rollout_batch_size"):
            _ = holder.rollout_batchsize
        with pytest.raises(AttributeError, match=r"args.\w+_router_ip"):
            _ = holder.sglang_router_ip
        assert not hasattr(holder, "release_train")


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
        "import sys, time; start = time.process_time()\n"
        "from instep.arguments.parse import parse\n"
        "from instep.arguments.help import format_help\n"
        "text = format_help(); parse(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'aiohttp', 'megatron', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.process_time() - start)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = []
    command = [sys.executable, "-c", code, *argv()]
    for _ in range(3):  # the best of them: the machine may be busy
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < allowed(0.5), seconds


def test_help_shows_every_flag_that_acts():
    text = format_help()
    elsewhere = ["--port", "--dpo-beta", "--dpo-label-smoothing", "--chosen-key", "--rejected-key"]  # of serve and dpo
    elsewhere += ["--update-weights-interval", "--max-staleness", "--stale-groups"]  # of train-async
    known = [*own_flags().values(), *own_flags(sglang=True).values()]
    acting = {flag.name for flag in known if flag.status == "acts" and flag.name not in elsewhere}
    for flag in known:
        assert (f"  {flag.name} " in text or f"  {flag.name}\n" in text) == (flag.name in acting), flag.name
    assert "Example:" in text and max(map(len, text.splitlines())) <= 120
    example = text[text.index("instep train --hf-checkpoint") :].replace("\\\n", " ").split()[2:]
    for name in ("models/tiny", "train.jsonl", "eval.jsonl"):
        path = Path(name)
        path.mkdir(parents=True) if name == "models/tiny" else path.write_text('{"prompt": []}\n')
    Path("models/tiny/config.json").write_text(json.dumps(CONFIG))
    Path("models/tiny/model.safetensors").write_bytes(b"0")
    assert parse(example).num_rollout == 50  # the example that help shows is right


def test_serve_takes_the_flags_of_engines_and_no_other(monkeypatch):
    monkeypatch.setattr(cluster, "num_usable_cpus", lambda: 1)  # a trainer's ranks would not fit
    assert parse(["--hf-checkpoint", "model", "--device", "cpu"], "serve").device == "cpu"
    text = format_help("serve")
    shown = {name for name in own_flags() if f"  {name} " in text or f"  {name}\n" in text}
    known = [*own_flags().values(), *own_flags(sglang=True).values()]
    assert shown == {flag.name for flag in known if flag.served}
    assert max(map(len, text.splitlines())) <= 120
    args = parse(["--hf-checkpoint", "model", "--rollout-num-gpus", "2", "--vllm-max-num-seqs", "8"], "serve")
    assert (args.port, args.rollout_num_engines, args.run_dir) == (8000, 2, "runs/serve")
    plan = make_plan(args)
    assert not plan.actor and plan.engines == ((Slot(0, 0),), (Slot(0, 1),))  # no trainer takes a place
    assert parse(["--hf-checkpoint", "model", "--vllm-block-size", "16"], "serve").rollout_backend == "vllm"
    os.close(os.open("key", os.O_CREAT | os.O_WRONLY, 0o600))
    Path("key").write_text("secret")
    for extra, wanted in (
        ("--lr 1e-3", "--lr"),
        ("--swiglu", "--swiglu"),
        ("--cluster ray", "--cluster"),
        ("--no-api-key --api-key-file key", "--api-key-file and --no-api-key"),
        ("--port 9000 --vllm-router-ip 127.0.0.1 --vllm-router-port 80", "--port and --vllm-router-ip"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(["--hf-checkpoint", "model", *extra.split()], "serve")
        assert caught.value.where == wanted, caught.value
    assert "--hf-checkpoint" in refusal(without="--hf-checkpoint", command="serve")
    assert "acts in `instep serve` only" in refusal("--port 9000")
