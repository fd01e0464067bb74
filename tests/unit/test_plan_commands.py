"""`instep plan sft`, `dpo` and `train-async`, and the memory of a host that has no GPUs."""

import json
from functools import partial

import pytest

from benchmarks.plan_seconds import H100
from instep.arguments.parse import parse
from instep.cli import main
from instep.errors import ConfigError
from instep.preflight.plan import command, memory, trainer
from instep.preflight.plan.memory import plan_memory
from instep.preflight.plan.seconds import predict
from tests.memory_plans import make_folder, of

SHORT = "--rollout-max-prompt-len 128 --rollout-max-response-len 64 --rollout-batch-size 2 --n-samples-per-prompt 4 "
SHORT += "--micro-batch-size 1"


@pytest.fixture
def plan(tmp_path):
    """`plan(command, flags, size)`: the arguments of a plan and its only kind of GPU or host."""

    def of_flags(name, flags="", size="0.5b"):
        words = f"--hf-checkpoint {make_folder(tmp_path, size)} --train-backend hf {flags}"
        args = parse(words.split(), f"plan {name}")
        return args, *plan_memory(args)

    return of_flags


@pytest.mark.parametrize(  # PSS of all processes in runs with 0.5 B parameters on two cores; no file of them is kept
    "name, flags, seen",
    [
        ("sft", "--rollout-max-prompt-len 251 --micro-batch-size 1", 9.84),
        ("sft", "--rollout-max-prompt-len 251 --micro-batch-size 2 --actor-num-gpus-per-node 2", 14.27),
        ("dpo", "--rollout-max-prompt-len 128 --vllm-max-model-len 256 --micro-batch-size 1", 12.65),
        ("train", SHORT, 12.15),
        ("train", f"{SHORT} --weight-sync single-copy", 10.28),
        ("train", f"{SHORT} --rollout-backend vllm --vllm-max-model-len 256", 13.11),
    ],
)
def test_runs_on_a_cpu_needed_what_is_planned(plan, name, flags, seen):
    args, host = plan(name, f"--device cpu {flags}")
    assert host.what == "host" and host.tightest == "training"
    assert host.need("training") / 1e9 == pytest.approx(seen, rel=0.08)
    assert args.command == name and of(host, "weights") >= 1.89


def test_vllm_beside_a_gpu_needs_more_of_the_host_than_a_rank(plan):
    _, *kinds = plan("train", "--actor-num-gpus-per-node 1 --rollout-num-gpus 1")
    rank, engine = (kind.host - sum(i.host for i in kind.items if "parked" in i.name) for kind in kinds)
    assert (rank, engine) == (3e9, 7e9)  # as docs/plan.md says


def test_ranks_and_engines_share_the_memory_of_their_host(plan):
    _, host = plan("train", f"--device cpu {SHORT}")
    _, two = plan("train", f"--device cpu {SHORT} --rollout-num-gpus 2 --actor-num-gpus-per-node 2")
    assert {item.owner for item in two.items} == {"controller", "actor", "engine 0", "engine 1"}
    weights = {item.owner: item.gpu["training"] for item in two.items if item.name == "weights"}
    assert weights["engine 1"] == pytest.approx(4 * 473e6, rel=0.01) and weights["actor"] > weights["engine 1"]
    sums = [sum(item.gpu["training"] for item in kind.items if item.name == "moments") for kind in (host, two)]
    assert sums[0] == sums[1], "the ranks share them"
    _, one, other = plan(
        "train", f"--device cpu {SHORT} --num-gpus-per-node 1 --cluster ray --actor-num-gpus-per-node 1"
    )
    assert {item.owner for item in one.items} == {"controller", "actor"}
    assert {item.owner for item in other.items} == {"controller", "engine 0"}


def test_a_host_that_is_too_small_is_refused(plan, monkeypatch, capsys):
    words = ["plan", "sft", "--hf-checkpoint", plan("sft")[0].hf_checkpoint, "--device", "cpu", "--train-backend", "hf"]
    for module in (memory, trainer):
        monkeypatch.setattr(module, "memory_of", lambda _: 16e9)
    assert main(words) == 0 and "tightest: training" in capsys.readouterr().out
    monkeypatch.setattr(memory, "memory_of", lambda _: 8e9)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "of a host that has 8" in err and "--lora-rank" in err and "offload" not in err and "--actor-num" not in err


def test_what_trains_on_data_has_no_engines_and_no_sync(plan, capsys):
    _, sft = plan("sft", "--actor-num-gpus-per-node 1", "4b")
    _, dpo = plan("dpo", "--actor-num-gpus-per-node 1", "4b")
    assert sft.phases == ("training",) and dpo.phases == ("log-probs", "training") and not sft.engines
    assert of(sft, "masters") == pytest.approx(16.1, rel=0.01) and of(dpo, "reference") == pytest.approx(8.0, rel=0.01)
    assert main(["plan", "sft", "--json", "--hf-checkpoint", plan("sft")[0].hf_checkpoint]) == 0
    assert set(json.loads(capsys.readouterr().out)["memory"][0]["need"]) == {"training"}


def test_seconds_are_those_of_the_training(plan):
    flags = "--actor-num-gpus-per-node 1 --rollout-batch-size 256 --rollout-max-prompt-len 640"
    args, _ = plan("sft", f"{flags} --no-torch-compile", "0.6b")
    found = predict(args, H100)
    assert set(found) == {"train"} and 0.75 * 4.9 <= found["train"] <= 1.25 * 4.9  # as in test_plan_seconds.py
    assert predict(args, H100, 320)["train"] < 0.6 * found["train"]
    assert set(predict(plan("dpo", flags)[0], H100)) == {"log-probs", "train"}


def test_sft_on_gpus_is_checked_and_gets_its_micro_batches(plan, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    more = f"--device cuda --actor-num-gpus-per-node 1 --prompt-data {tmp_path / 'data.jsonl'} --input-key messages "
    more += f"--num-rollout 1 --rollout-batch-size 8 --run-dir {tmp_path / 'run'} --train-backend hf --hf-checkpoint "
    more += make_folder(tmp_path, "4b")
    (tmp_path / "4b-0" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    chosen = {}
    for size in (80, 140):
        words = f"{more} --gpu-memory-gb {size}".split()
        args = parse(words, "sft")
        command.check_launch(args, words)
        chosen[size] = args.max_tokens_per_gpu
        planned, kind = plan("sft", f"--actor-num-gpus-per-node 1 --gpu-memory-gb {size}", "4b")
        assert planned.max_tokens_per_gpu == chosen[size] and kind.need("training") <= 0.9 * kind.size
    assert 1024 <= chosen[80] < chosen[140]
    small = f"{more} --gpu-memory-gb 60".split()
    with pytest.raises(ConfigError, match="planned before anything starts"):
        command.check_launch(parse(small, "sft"), small)


def test_a_plan_takes_the_flags_of_its_command(plan):
    assert plan("train-async", "--max-staleness 2 --colocate")[0].offload_train is False
    assert plan("train", "--colocate")[0].offload_train is True
    refused = partial(plan, "sft", "--rollout-max-response-len 5")
    with pytest.raises(ConfigError, match="instep sft.*samples nothing"):
        refused()
    with pytest.raises(ConfigError, match="instep plan dpo"):
        plan("dpo", "--n-samples-per-prompt 4 --apply-chat-template")


def test_all_ranks_of_an_engine_count_on_a_cpu(plan):
    """Tensor parallelism shares out the weights of an engine, and each rank has a process."""
    one, two = (
        plan("train", f"--device cpu {SHORT} --rollout-backend vllm --vllm-max-model-len 256 --rollout-num-gpus {n} "
             f"--rollout-num-gpus-per-engine {n}")[1]
        for n in (1, 2)
    )  # fmt: skip
    weights = [
        [i.gpu["training"] for i in kind.items if i.owner != "actor" and i.name == "weights"] for kind in (one, two)
    ]
    assert weights[0] == pytest.approx(weights[1], rel=0.02) and weights[0][0] > 1.8e9
