"""A plan refuses no run and chooses no large micro-batch by what it does not know."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.random_model import dimensions
from instep.arguments.parse import parse
from instep.controller.profile import StepProfile
from instep.errors import ConfigError, EngineError
from instep.models.sizes import quantized_bytes, shape_of
from instep.preflight.plan import command
from instep.preflight.plan.memory import plan_memory
from instep.preflight.plan.trainer import rank_of
from instep.system.spans import of_torch

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 48}
EXPERTS |= {"hidden_size": 2048, "num_key_value_heads": 4, "tie_word_embeddings": False, "model_type": "qwen3_moe"}


@pytest.fixture
def plan(tmp_path):
    """`plan(flags, **config)`: the words of a plan of a Qwen3 of 4 B parameters, with one GPU of 80 GiB."""

    def words(more="", **config):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **dimensions("4b"), **config}))
        shape_of.cache_clear()
        quantized_bytes.cache_clear()
        out = f"--hf-checkpoint {tmp_path} --colocate --actor-num-gpus-per-node 1 --rollout-backend vllm "
        out += "--precision bf16 --rollout-max-prompt-len 512 --rollout-max-response-len 1536 --train-backend hf "
        return f"{out} --rollout-batch-size 8 {more}".split()

    return words


def kinds(words):
    return plan_memory(parse(words, "plan"))


def of(kind, name, owner="actor"):
    return max(max(i.gpu.values(), default=0.0) for i in kind.items if (i.owner, i.name) == (owner, name)) / 1e9


def write(path, tensors):
    header = json.dumps({name: {"dtype": "BF16", "shape": shape} for name, shape in tensors.items()}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_experts_are_shared_by_expert_parallel_ranks(plan):
    megatron = "--train-backend megatron --actor-num-gpus-per-node 8 --sequence-parallel --micro-batch-size 1 "
    megatron += "--vllm-gpu-memory-utilization 0.5 --rollout-num-gpus-per-engine 8 "
    (whole,) = kinds(plan(megatron, **EXPERTS))
    (spread,) = kinds(plan(f"{megatron} --expert-model-parallel-size 8 --use-distributed-optimizer", **EXPERTS))
    shape = shape_of(plan(**EXPERTS)[1])
    assert shape.experts == 48 * 128 * 3 * 2048 * 768
    rank = shape.total - shape.experts + shape.experts / 8
    assert of(whole, "gradients") == pytest.approx(4 * shape.total / 1e9)
    assert of(spread, "gradients") == pytest.approx(4 * rank / 1e9)
    assert of(spread, "weights") == pytest.approx(2 * rank / 1e9, rel=0.05)
    assert of(spread, "moments") == pytest.approx(shape.total / 1e9)
    assert whole.is_refused and not spread.is_refused
    both = "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    (mixed,) = kinds(plan(f"{megatron} {both} --pipeline-model-parallel-size 2", **EXPERTS))
    share = (shape.total - shape.experts) / 2 + shape.experts / 4
    assert of(mixed, "masters") == pytest.approx(4 * share / 2 / 1e9)


def test_context_parallel_ranks_share_a_sample_and_keep_their_own_keys(plan):
    megatron = "--train-backend megatron --actor-num-gpus-per-node 4 "
    ranks = []
    for cp in (1, 4):
        args = parse(plan(f"{megatron} --context-parallel-size {cp} --micro-batch-size 1"), "plan")
        ranks.append(rank_of(args, shape_of(args.hf_checkpoint)))
    assert [rank.stream for rank in ranks] == [2048, 512]
    few = f"{megatron} --use-dynamic-batch-size --max-tokens-per-gpu 512 --context-parallel-size 4"
    args = parse(plan(few), "plan")
    assert rank_of(args, shape_of(args.hf_checkpoint)).stream == 512
    one, four = (
        kinds(plan(f"{megatron} --context-parallel-size {cp} --use-dynamic-batch-size --max-tokens-per-gpu 4096"))[0]
        for cp in (1, 4)
    )
    assert of(four, "activations") == pytest.approx(of(one, "activations"))


def test_virtual_stages_keep_more(plan):
    flags = "--train-backend megatron --actor-num-gpus-per-node 4 --pipeline-model-parallel-size 4 --micro-batch-size 1"
    plain, virtual = (kinds(plan(f"{flags} {more}"))[0] for more in ("", "--num-virtual-stages-per-pipeline-rank 3"))
    assert 1.15 < of(virtual, "activations") / of(plain, "activations") <= 1.25


def run_words(plan, tmp_path, more):
    write(tmp_path / "model.safetensors", {"a": [4_000_000_000]})
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n')
    data = f"--prompt-data {tmp_path / 'data.jsonl'} --input-key prompt --rm-type random --num-rollout 1"
    return plan(f"--device cuda {data} --run-dir {tmp_path / 'run'} {more}")


def test_a_run_on_gpus_of_unknown_memory_is_neither_checked_nor_tuned(plan, tmp_path):
    words = run_words(plan, tmp_path, "--vllm-kv-cache-memory-bytes 90000000000")
    args = parse(words, "train")
    command.check_launch(args, words)
    assert not args.use_dynamic_batch_size and args.micro_batch_size == 1
    assert sum("--gpu-memory-gb: the memory of the GPUs is not known" in note for note in args.notes) == 1
    asked = parse([*words, "--use-dynamic-batch-size"], "train")
    assert asked.max_tokens_per_gpu == 1024
    known = [*words, "--gpu-memory-gb", "80"]
    args = parse(known, "train")
    assert args.use_dynamic_batch_size and not any("--gpu-memory-gb" in note for note in args.notes)
    with pytest.raises(ConfigError) as caught:
        command.check_launch(args, known)
    assert "80 GiB (--gpu-memory-gb)" in caught.value.where


def test_instep_plan_says_that_it_assumes_a_size(plan, capsys):
    command.plan(plan())
    assert "GPUs are assumed to have 80 GiB (--gpu-memory-gb)" in capsys.readouterr().out
    command.plan(plan("--gpu-memory-gb 80"))
    assert "taken to have" not in capsys.readouterr().out


def test_no_size_is_chosen_for_what_is_not_counted(plan):
    assert parse(plan(), "plan").use_dynamic_batch_size
    custom = plan("--loss-type custom_loss --custom-loss-function-path json.loads")
    assert not parse(custom, "plan").use_dynamic_batch_size
    virtual = "--train-backend megatron --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 "
    assert not parse(plan(f"{virtual} --num-virtual-stages-per-pipeline-rank 2"), "plan").use_dynamic_batch_size


def test_selected_weights_count_no_gradients_and_a_note_says_so(plan):
    words = plan("--train-backend megatron --only-train-params-name-list output_layer")
    (kind,) = kinds(words)
    assert of(kind, "gradients") == of(kind, "moments") == of(kind, "masters") == 0 < of(kind, "weights")
    assert parse(words, "plan").max_tokens_per_gpu == parse(plan("--train-backend megatron"), "plan").max_tokens_per_gpu
    assert any("does not count gradients and moments" in note for note in parse(words, "plan").notes)


def test_a_quantized_model_weighs_what_its_files_do(plan, tmp_path):
    apart = "--rollout-num-gpus-per-engine 1"
    assert of(kinds(plan(apart))[0], "weights", "engine 0") == pytest.approx(8.0, rel=0.02)
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(99_990))
    (kind,) = kinds(plan(apart, quantization_config={"bits": 4}))
    assert of(kind, "weights", "engine 0") == pytest.approx(1e-4)
    (kind,) = kinds(
        plan(f"{apart} --weight-sync restart", quantization_config={"bits": 4})
    )  # on exports, which are whole
    assert of(kind, "weights", "engine 0") == pytest.approx(8.0, rel=0.02)


def test_an_engines_experts_lie_on_all_of_its_gpus(plan):
    eight = "--actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 8 --vllm-data-parallel-size 8"
    (kind,) = kinds(plan(f"{eight} --vllm-enable-expert-parallel", **EXPERTS))
    shape = shape_of(plan(**EXPERTS)[1])
    share = shape.total - shape.experts + shape.experts / 8
    assert of(kind, "weights", "engine 0") == pytest.approx(2 * share / 1e9)


def test_engines_work_is_that_of_their_own_bounds(plan):
    large, small = (kinds(plan(f"--gpu-memory-gb {size}"))[0].engines[0].work for size in (80, 60))
    assert large > 1.5 * small
    few, most = (
        kinds(plan(f"--rollout-backend embedded --rollout-batch-size {n} --micro-batch-size 1"))[0].engines[0].cache
        for n in (256, 2560)
    )
    assert few == most > 0


def test_an_engine_is_starved_only_beyond_the_margin(plan):
    near, far = (kinds(plan(f"--vllm-gpu-memory-utilization {part}"))[0] for part in (0.13, 0.02))
    assert near.starved is None and not near.fits and far.starved is not None and far.is_refused


def test_only_the_files_of_the_model_are_counted(plan, tmp_path):
    counted = lambda: shape_of(plan()[1]).total  # noqa: E731
    planned = counted()
    write(tmp_path / "consolidated.safetensors", {"a": [5_000_000_000]})
    write(tmp_path / "model-1.safetensors", {"a": [3_000_000_000]})
    write(tmp_path / "model-2.safetensors", {"b": [2_000_000_000]})
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert counted() == 5_000_000_000
    (tmp_path / "model-2.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0[]")
    assert counted() == planned
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert counted() == planned


def test_an_odd_trace_ends_no_run(tmp_path):
    cut = tmp_path / "cut.pt.trace.json.gz"
    cut.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff")
    (tmp_path / "odd.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}')
    for file in (cut, tmp_path / "odd.json", tmp_path / "other.json", tmp_path / "none.json"):
        with pytest.raises(ValueError, match="is not a complete trace"):
            of_torch(file, "engine 0")
    waits, lines = [], []

    def engine(name, stop):
        def stop_profile(engine, folder, timeout):
            waits.append(timeout)
            return stop()

        return SimpleNamespace(name=name, kind=SimpleNamespace(stop_profile=stop_profile))

    def refuses():
        raise EngineError("it is gone")

    args = SimpleNamespace(profile=False, profile_step_start=0, profile_step_end=1, train_timeout=3600.0)
    log = SimpleNamespace(run_dir=tmp_path, progress=SimpleNamespace(line=lines.append))
    profile = StepProfile(args, SimpleNamespace(worker_groups=[]), log)
    engines = [engine("engine 0", lambda: of_torch(cut, "engine 0")), engine("engine 1", refuses)]
    assert profile._stop(engines, 0, 1) == [] and waits == [300.0, 300.0]
    assert "cut.pt.trace.json.gz is not a complete trace" in lines[0] and lines[1].endswith("it is gone")


def test_without_a_model_nothing_is_said_about_memory():
    assert kinds("--colocate --actor-num-gpus-per-node 1".split()) == []
