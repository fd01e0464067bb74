"""`instep plan` refuses what cannot fit, names what does, and chooses sizes and turns by the room that is left."""

from functools import partial

import pytest

from instep.arguments.parse import parse
from instep.cli import main
from instep.errors import ConfigError
from instep.models.sizes import shape_of
from instep.preflight.plan import command, place
from instep.preflight.plan.engine import plan_engine
from instep.preflight.plan.memory import plan_engines, tables
from instep.preflight.plan.trainer import rank_of, work
from tests.memory_plans import HALF, SIDE_BY_SIDE, of, only, words


@pytest.fixture
def plan(tmp_path):
    return partial(words, tmp_path)


def test_what_fits_in_turns_only_is_refused_side_by_side_and_the_remedy_names_them(plan, capsys):
    """4 B parameters on a card of 80 GiB, as docs/plan.md has it."""
    for turns in ("", "--offload"):
        kind = only(plan(f"{HALF} {turns}"))
        assert kind.fits and of(kind, "masters") == pytest.approx(4 * 4.022, rel=1e-3)  # in float32
        assert of(kind, "KV cache") >= kind.size / 2e9
        assert main(["plan", *plan(f"{HALF} {turns}")]) == 0
    capsys.readouterr()
    assert main(["plan", *plan(f"{HALF} {SIDE_BY_SIDE}")]) == 2
    err = capsys.readouterr().err
    assert "the training needs about 125 GB of a GPU that has 86" in err
    assert "use --offload (without --no-offload-train and --no-offload-rollout)" in err
    assert main(["plan", *plan(f"{HALF} {SIDE_BY_SIDE} --gpu-memory-gb 180")]) == 0


@pytest.mark.parametrize(
    "flags, remedy",
    [
        ("--use-dynamic-batch-size --max-tokens-per-gpu 32768", "--max-tokens-per-gpu"),
        ("--micro-batch-size 16", "--use-dynamic-batch-size --max-tokens-per-gpu"),
        ("--gpu-memory-gb 72 --rollout-max-response-len 8192", "--recompute-granularity"),
        ("--gpu-memory-gb 60 --recompute-granularity full", "--optimizer adamw_8bit"),
        (
            "--train-backend megatron --gpu-memory-gb 60 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--optimizer adamw_8bit",
        ),
        ("--gpu-memory-gb 40 --recompute-granularity full", "--optimizer-cpu-offload"),
        ("--gpu-memory-gb 20", "--actor-num-gpus-per-node"),
    ],
)
def test_the_remedy_names_what_saves_memory(plan, flags, remedy):
    with pytest.raises(ConfigError) as caught:
        command.plan(plan(flags))
    assert remedy in caught.value.remedy, caught.value.remedy


def test_a_cache_holds_what_its_bytes_allow(plan):
    more = "--vllm-kv-cache-memory-bytes 4294967296 --rollout-max-prompt-len 128 --rollout-max-response-len 512"
    args = parse(plan(more, size="0.6b"), "plan")
    (spec,) = plan_engines(args)
    planned = plan_engine(args, spec, shape_of(args.hf_checkpoint), 80e9)
    per_token = 2 * 28 * 8 * 128 * 2
    assert planned.tokens == 4294967296 // per_token // 16 * 16 and planned.requests == planned.tokens // 640


def test_an_engine_without_room_for_one_request_is_refused(plan):
    with pytest.raises(ConfigError) as caught:
        command.plan(plan("--vllm-gpu-memory-utilization 0.02"))
    assert "tokens of KV cache, but a request may have 2,048" in caught.value.what


def test_within_the_margin_nothing_is_refused_and_a_line_says_that_it_is_close(plan):
    fixed = "--use-dynamic-batch-size --max-tokens-per-gpu 4096"
    most = only(plan(fixed)).need("training") / 2**30
    assert only(plan(f"{fixed} --gpu-memory-gb {most / 1.08}")).is_refused is False
    assert only(plan(f"{fixed} --gpu-memory-gb {most / 1.12}")).is_refused is True
    close = only(plan(f"{fixed} --gpu-memory-gb {most / 0.97}"))
    assert any("this is close" in str(line) for line in tables([close]))


def test_the_plan_chooses_the_size_of_micro_batches(plan, monkeypatch):
    chosen = {size: parse(plan(size=size), "plan").max_tokens_per_gpu for size in ("0.6b", "4b")}
    assert chosen["0.6b"] == 32768 and 1024 <= chosen["4b"] < 16384
    with_recomputation = parse(plan("--recompute-granularity full"), "plan").max_tokens_per_gpu
    assert with_recomputation > chosen["4b"]
    samples = parse(plan("--micro-batch-size 2"), "plan")
    assert not samples.use_dynamic_batch_size and samples.max_tokens_per_gpu is None
    assert not parse(plan("--device cpu --micro-batch-size 2"), "plan").use_dynamic_batch_size
    short = "--rollout-max-response-len 64 --vllm-max-model-len 256 --rollout-max-prompt-len 128"
    for size, tokens in ((22.5, 1024), (20.5, 512), (5, 256)):
        monkeypatch.setattr(place, "host_memory", lambda size=size: size * 1e9)
        args = parse(plan(f"--device cpu --precision fp32 {short}", size="0.6b"), "plan")
        assert args.max_tokens_per_gpu == tokens, size
    apart = [word for word in plan("--rollout-num-gpus 1", size="0.6b") if word != "--colocate"]
    assert parse(apart, "plan").max_tokens_per_gpu == 32768, "the engine has filled a GPU of its own"
    asked = parse(plan("--use-dynamic-batch-size"), "plan")
    assert asked.max_tokens_per_gpu == chosen["4b"]


def test_a_run_on_gpus_is_checked_before_it_starts(plan, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n')
    more = "--device cuda --gpu-memory-gb 80 "
    more += f"--prompt-data {tmp_path / 'data.jsonl'} --input-key prompt --rm-type random --num-rollout 1 "
    more += f"--rollout-batch-size 8 --run-dir {tmp_path / 'run'}"
    words = plan(more)
    (tmp_path / "4b-0" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    args = parse(words, "train")
    assert args.use_dynamic_batch_size and args.max_tokens_per_gpu
    command.check_launch(args, words)
    assert not (tmp_path / "run").exists()
    small = [*words, "--gpu-memory-gb", "40"]
    with pytest.raises(ConfigError, match="planned before anything starts"):
        command.check_launch(parse(small, "train"), small)
    command.check_launch(parse([*words, "--device", "cpu"], "train"), words)


@pytest.mark.parametrize(
    "flags, size, stays",
    [
        ("--rollout-batch-size 32", "0.6b", True),
        ("--rollout-batch-size 64", "0.6b", False),  # the KV cache would hold fewer of 512 samples
        ("--rollout-batch-size 32 --offload", "0.6b", False),
        (f"--rollout-batch-size 32 {SIDE_BY_SIDE}", "0.6b", False),
        ("--rollout-batch-size 32 --weight-sync single-copy", "0.6b", False),
        ("--rollout-batch-size 8", "1.7b", False),  # with micro-batches of 4,096 tokens
        ("--rollout-batch-size 8", "4b", False),
        ("--rollout-batch-size 8 --only-train-params-name-list .*mlp.* --micro-batch-size 1", "4b", False),
        (
            "--rollout-batch-size 32 --use-dynamic-batch-size --max-tokens-per-gpu 32768",
            "0.6b",
            False,
        ),  # 0.9 of the GPU
        ("--rollout-batch-size 32 --rollout-backend embedded", "0.6b", False),  # it does not wait for the trainer
        ("--rollout-batch-size 32 --cluster ray", "0.6b", False),
    ],
)
def test_nobody_takes_turns_where_all_fits_and_a_note_says_so(plan, capsys, flags, size, stays):
    more = f"--n-samples-per-prompt 8 --rollout-max-response-len 512 --vllm-max-model-len 768 {flags}"
    assert main(["plan", *plan(more, size=size)]) == 0
    (*notes,) = [line for line in capsys.readouterr().out.splitlines() if "fit on their GPUs at the same time" in line]
    args = parse(plan(f"{more} --device cuda --gpu-memory-gb 80", size=size), "plan")
    assert [note for note in args.notes if "fit on their GPUs at the same time" in note] == notes
    assert len(notes) == stays and all("--offload makes them take turns" in note for note in notes)
    if stays:
        assert not args.offload_train and not args.offload_rollout and args.max_tokens_per_gpu >= 8192
    elif SIDE_BY_SIDE not in flags and "single-copy" not in flags:
        assert args.offload_train and args.offload_rollout


def test_backward_work_is_bounded_by_a_chunk_of_logits(plan):
    args = parse(plan("--use-dynamic-batch-size --max-tokens-per-gpu 32768"), "plan")
    rank = rank_of(args, shape_of(args.hf_checkpoint))
    assert work(rank) < 4e9, "no logits of all tokens"
