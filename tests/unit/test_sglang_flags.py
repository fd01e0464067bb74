"""`--sglang-*`: when they are SGLang's, how each reaches its command line, and what is refused."""

import json
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.arguments.parser import for_sglang
from instep.cluster.engine_plan import plan_engines
from instep.engines import flags
from instep.engines.backend_choice import resolve_backend
from instep.engines.dialect import Parallel
from instep.engines.flags import EngineFlag, engine_words, flag_table, read_table, router_arguments
from instep.engines.kind import kind_of
from instep.engines.reserved_flags import reserved
from instep.engines.topology import max_model_lens
from instep.errors import ConfigError
from tests.command_line import make_folder


@pytest.fixture(autouse=True)
def committed(tmp_path, monkeypatch):
    """The committed tables, whatever is installed here, and a folder with a model."""
    monkeypatch.setattr(flags, "installed_version", lambda package: "")
    flag_table.cache_clear()
    yield make_folder(tmp_path, monkeypatch)
    flag_table.cache_clear()


def arguments(words: str):
    return parse(["--hf-checkpoint", "model", *words.split()], "plan")


def refusal(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(words)
    return str(caught.value)


def value(flag: EngineFlag) -> list[str]:
    """Legal words for a flag."""
    if flag.kind in ("switch", "boolean"):
        return []
    of_kind = {"int": "1", "float": "0.5", "si_size": "2k", "json": '{"a": 1}', "text": "x"}
    one = flag.choices[0] if flag.choices else of_kind[flag.kind]
    return [one, *[flag.choices[-1] if flag.choices else one] * (flag.nargs in ("*", "+"))]


# ---- whose they are --------------------------------------------------------------------------------------------------

READ = [  # the words of a command line, and the kind of engines that they mean
    ("--sglang-mem-fraction-static 0.7", "sglang"),
    ("--sglang_mem_fraction_static=0.7", "sglang"),
    ("--rollout-backend auto --sglang-dtype half", "sglang"),
    ("--rollout-backend sglang", "sglang"),
    ("--rollout-backend=sglang --rollout-num-gpus 2", "sglang"),
    ("--sglang-router-ip 10.0.0.1 --sglang-router-port 3000", "sglang"),
    ("--rollout-backend vllm --sglang-mem-fraction-static 0.7", "vllm"),
    ("--sglang-context-length 99 --rollout-backend embedded", "embedded"),
    ("--sglang-context-length 99 --rollout-backend sglang --rollout-backend vllm", "vllm"),
    ("--router-policy random", "auto"),
    ("--vllm-block-size 16", "vllm"),
    ("", "auto"),
]


@pytest.mark.parametrize("words,kind", READ, ids=[words or "none" for words, _ in READ])
def test_the_engines_that_flags_mean(words, kind):
    args = arguments(words)
    assert args.rollout_backend == kind and for_sglang(words.split()) == (kind == "sglang")
    named = "--rollout-backend sglang" in words or "--rollout-backend=sglang" in words
    assert any("means --rollout-backend sglang" in note for note in args.notes) == (kind == "sglang" and not named)
    assert all(name.startswith("--sglang-") for name in args.sglang_flags)
    assert not args.vllm_overrides or kind != "sglang"


def test_with_another_kind_they_are_read_as_its_flags():
    args = arguments("--rollout-backend vllm --sglang-mem-fraction-static 0.7 --sglang-context-length 99")
    assert args.vllm_overrides == {"gpu_memory_utilization": ["--gpu-memory-utilization", "0.7"]}
    assert args.vllm_max_model_len == 99 and args.sglang_overrides == {} and args.sglang_flags == []
    assert len(args.notes) == 2


@pytest.mark.parametrize("words", ["--sglang-dtype half", "--rollout-backend sglang"])
def test_flags_of_vllm_beside_them_are_one_error(words):
    text = refusal(f"{words} --vllm-block-size 16 --vllm-enforce-eager")
    assert "things are wrong" not in text and "engines of one kind, SGLang's or vLLM's" in text
    assert f"--vllm-block-size, --vllm-enforce-eager beside {words.rpartition(' half')[0] or words}" in text
    assert "--rollout-backend vllm, which reads the flags that have an equivalent" in text


def test_without_sglang_the_error_says_what_installs_it(monkeypatch):
    args = arguments("--sglang-mem-fraction-static 0.7 --sglang-dtype half").replace(device="cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="SGLang is not installed here") as caught:
        resolve_backend(args)
    assert caught.value.where == ("--rollout-backend sglang, which --sglang-mem-fraction-static, --sglang-dtype means")
    assert caught.value.remedy.startswith("instep install sglang") and "--rollout-backend vllm" in caught.value.remedy


# ---- each flag -------------------------------------------------------------------------------------------------------


def test_every_flag_arrives_as_it_was_typed():
    refused = {"speculative_algorithm"} | {field for field, _, _ in reserved("sglang")}
    table = read_table("sglang", "0.5.17").flags
    known = [flag for flag in table if flag.field not in refused]
    assert len(table) == 474 and len(known) == 474 - 52
    needed = {"dp_size": "--sglang-enable-dp-attention", "dtype": ""}
    for flag in known:
        typed = ["--sglang-" + flag.name.removeprefix("--"), *value(flag)]
        args = parse([*typed, *needed.get(flag.field, "").split()], "plan")
        assert args.sglang_overrides[flag.field] == [flag.name, *typed[1:]], flag.name
        assert engine_words(args)[flag.field] == [flag.name, *typed[1:]]
    off = [negation for flag in known for negation in flag.negations]
    args = parse(["--sglang-" + name.removeprefix("--") for name in off], "plan")
    assert sorted(word for words in args.sglang_overrides.values() for word in words) == sorted(off) and len(off) == 4


def test_every_flag_of_the_router_arrives_as_it_was_typed():
    refused = {field for field, _, _ in reserved("sglang-router")}
    known = [flag for flag in read_table("sglang-router", "0.3.2").flags if flag.field not in refused]
    assert len(known) == 98 - 30
    typed = [word for flag in known for word in ("--router-" + flag.name.removeprefix("--"), *value(flag))]
    args = parse(["--rollout-backend", "sglang", *typed], "plan")
    assert router_arguments(args) == [word.replace("--router-", "--") for word in typed]
    assert "unknown flag of vllm-router" in refusal("--router-jwt-issuer x")
    assert "unknown flag of sglang-router" in refusal("--router-kv-connector nixl --rollout-backend sglang")


def test_old_names_set_the_fields_of_today():
    by_field = read_table("sglang", "0.5.17").by_field
    assert by_field["cuda_graph_bs_decode"].name == "--cuda-graph-bs-decode"
    assert by_field["dsa_prefill_backend"].name == "--dsa-prefill-backend"
    args = arguments("--sglang-enable-deepep-moe --sglang-enable-ep-moe --rollout-num-gpus-per-engine 4")
    (engine,) = plan_engines(args)
    assert engine.words["moe_a2a_backend"] == ["--moe-a2a-backend", "deepep"]
    assert engine.words["ep_size"] == ["--ep-size", "4"] and engine.parallel == Parallel(4, expert=4)
    assert "--sglang-enable-deepep-moe: is read as --sglang-moe-a2a-backend deepep: SGLang has renamed it" in args.notes
    assert any(note.startswith("--sglang-enable-ep-moe: is read as --sglang-ep-size") for note in args.notes)
    assert arguments("--rollout-backend sglang --sglang-enable-deepep-moe false").sglang_overrides == {}


def test_lengths_types_and_limits_reach_the_rest_of_instep():
    args = arguments("--sglang-context-length 4k --sglang-dtype half --sglang-server-concurrency 64")
    assert (args.vllm_max_model_len, args.vllm_dtype, max_model_lens(args)) == (4000, "float16", [4000])
    assert engine_words(args)["max_running_requests"] == ["--max-running-requests", "64"]
    for written, length in (("4096", 4096), ("1.5k", 1500), ("4Ki", 4096), ("1M", 10**6)):
        assert arguments(f"--sglang-context-length {written}").vllm_max_model_len == length
    assert "must be a whole number below 1e18" in refusal("--sglang-context-length 4K")
    args = arguments("--sglang-server-concurrency 64 --sglang-max-running-requests 8")
    assert engine_words(args)["max_running_requests"] == ["--max-running-requests", "8"]
    args = arguments("--rollout-backend sglang --vllm-max-model-len 99 --vllm-max-num-seqs 4 --vllm-dtype bfloat16")
    assert [words[-1] for words in args.sglang_overrides.values()] == ["99", "4", "bfloat16"]
    assert (args.vllm_max_model_len, args.vllm_dtype, len(args.notes)) == (99, "bfloat16", 3)


def test_their_router_is_named_by_their_flags():
    args = arguments("--sglang-router-ip 10.0.0.1 --sglang-router-port 3000 --sglang-router-request-timeout-secs 9")
    assert (args.vllm_router_ip, args.vllm_router_port) == ("10.0.0.1", 3000)
    assert args.router_overrides == {"request_timeout_secs": ["--request-timeout-secs", "9"]}
    text = refusal("--rollout-backend sglang --vllm-router-ip 10.0.0.1 --vllm-router-port 3000")
    assert "use --sglang-router-ip" in text and "use --sglang-router-port" in text
    args = arguments("--rollout-backend vllm --sglang-router-ip 10.0.0.1 --sglang-router-port 3000")
    assert (args.vllm_router_ip, args.vllm_router_port) == ("10.0.0.1", 3000)


WRONG = [
    ("--sglang-tp-size 2", "follows from an engine's GPUs", "use --rollout-num-gpus-per-engine"),
    ("--sglang-port 3", "instep chooses the ports", "use --engine-port"),
    ("--sglang-api-key x", "read by all users of the host", "use --api-key-file"),
    ("--sglang-enable-memory-saver", "which has a flag", "use --offload-rollout"),
    ("--sglang-disaggregation-mode decode", "which engines prefill", "use --prefill-num-servers or --sglang-config"),
    ("--sglang-custom-weight-loader a.b", "the way of a weight sync has a flag", "use --weight-sync shm"),
    ("--sglang-tokenizer-worker-num 2", "reach one of several servers", "leave it out"),
    ("--sglang-mem-fraction 0.5", "unknown flag of SGLang 0.5.17", "did you mean --sglang-mem-fraction-static?"),
    ("--sglang-xyzzy 1", "unknown flag of SGLang 0.5.17", "`instep train --help sglang`"),
    ("--sglang-mem-fraction-static much", "'much' is not a number", ""),
    ("--sglang-kv-cache-dtype int3", "'int3' is not one of auto, bf16", ""),
    ("--sglang-dp-size 2", "an engine would have 2 replicas", "make more engines instead (--rollout-num-gpus)"),
    ("--sglang-dtype half --vllm-config x", "the engine is SGLang, not vLLM", "use --sglang-config"),
    ("--mem-fraction-static 1 --sglang-dtype half", "carry a prefix", "use --sglang-mem-fraction-static"),
    ("--cpu-offload-gb 1 --sglang-dtype half", "is a flag of SGLang, which needs a prefix", "use --sglang-cpu-offload"),
    ("--router-api-key x --rollout-backend sglang", "read by all users of the host", "use --api-key-file"),
    ("--router-mini-lb --rollout-backend sglang", "instep gives the router its engines", "or --sglang-config"),
]


@pytest.mark.parametrize("words,what,remedy", WRONG, ids=[words for words, _, _ in WRONG])
def test_what_is_wrong_is_told(words, what, remedy):
    text = refusal(words)
    assert what in text and remedy in text and "things are wrong" not in text


def test_a_flag_that_asks_for_what_instep_does_is_no_error():
    args = arguments("--sglang-skip-server-warmup --sglang-tokenizer-worker-num 1")
    assert args.rollout_backend == "sglang" and args.sglang_overrides == {}


# ---- how the GPUs of an engine share the work -----------------------------------------------------------------------

LAYOUTS = [
    ("1", "", Parallel(1), "TP 1"),
    ("8", "--sglang-pp-size 1", Parallel(8), "TP 8"),
    ("8", "--sglang-ep-size 8", Parallel(8, expert=8), "TP 8, EP 8"),
    ("8", "--sglang-enable-dp-attention --sglang-dp-size 4", Parallel(8, attention=4), "TP 8, attention DP 4"),
    ("8", "--sglang-enable-ep-moe", Parallel(8, expert=8), "TP 8, EP 8"),
    ("8", "--sglang-moe-a2a-backend deepep", Parallel(8, expert=8), "TP 8, EP 8"),
]


@pytest.mark.parametrize("gpus,words,layout,text", LAYOUTS, ids=[text for *_, text in LAYOUTS])
def test_the_parallel_sizes(gpus, words, layout, text):
    (engine,) = plan_engines(arguments(f"--rollout-backend sglang --rollout-num-gpus-per-engine {gpus} {words}"))
    assert engine.parallel == layout and str(layout) == text and "tp_size" not in engine.words
    assert layout.tensor * layout.pipeline * layout.data == int(gpus)


@pytest.mark.parametrize(
    "words,what",
    [
        ("--sglang-pp-size 2", "stages of a pipeline would wait for each other"),
        ("--sglang-ep-size 0", "ep_size is 0"),
        ("--sglang-ep-size 3", "ep_size 3 does not divide the 4 GPUs"),
        ("--sglang-dp-size 3 --sglang-enable-dp-attention", "dp_size 3 does not divide the 4 GPUs"),
        ("--sglang-dp-size 2", "an engine would have 2 replicas (dp_size), but a weight sync updates one"),
    ],
)
def test_parallel_sizes_that_do_not_fit(words, what):
    assert what in refusal(f"--rollout-num-gpus-per-engine 4 {words}")


# ---- speculative decoding --------------------------------------------------------------------------------------------

EAGLE = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1"


@pytest.mark.parametrize(
    "words, what",
    [
        (f"{EAGLE} --device cpu", "on a CPU SGLang takes the likeliest tokens then, at any temperature"),
        ("--sglang-speculative-algorithm NGRAM --device cpu", "on a CPU SGLang takes the likeliest tokens then"),
        ("--sglang-speculative-algorithm DFLASH", "does not know that samples of DFLASH follow the policy"),
        (f"{EAGLE} --sglang-speculative-accept-threshold-acc 0.9", "would accept more drafts than the policy"),
        (f"{EAGLE} --use-rollout-routing-replay", "has not compared the experts of accepted drafts"),
    ],
)
def test_speculation_is_refused_by_one_error(words, what):
    text = refusal(words if "--device" in words else f"{words} --device cuda")
    assert what in text and "--sglang-speculative-algorithm " in text and "things are wrong" not in text


def test_speculation_is_passed_on_and_a_drafter_keeps_its_weights_in_sleep():
    for words in ("--sglang-speculative-algorithm NGRAM", EAGLE, EAGLE.replace("EAGLE", "NEXTN")):
        args = arguments(f"{words} --device cuda --colocate --offload")
        assert "speculative_algorithm" in engine_words(args)
        assert "--enable-draft-weights-cpu-backup" in plan_engines(args)[0].flags
    assert "--enable-draft-weights-cpu-backup" not in plan_engines(arguments("--device cuda --colocate"))[0].flags
    one_memory = arguments(f"{EAGLE} --device cuda --colocate").replace(weight_sync="single-copy", mtp_num_layers=1)
    with pytest.raises(ConfigError, match="single-copy would not reach SGLang's drafter"):
        plan_engines(one_memory)


# ---- --sglang-config -------------------------------------------------------------------------------------------------

FILE = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: 2, overrides: {context_length: 512, cuda_graph_bs_decode: [1, 2]}}
  - name: ref
    model_path: ref
    update_weights: false
    server_groups:
      - {num_gpus: 4, num_gpus_per_engine: 4, overrides: {dp_size: 2, enable_dp_attention: true, dtype: float32}}
"""


def test_models_and_groups_of_a_file(committed):
    Path("groups.yaml").write_text(FILE)
    args = arguments("--sglang-config groups.yaml --sglang-context-length 1k --sglang-server-concurrency 7")
    prefill, decode, _, ref = engines = plan_engines(args)
    assert [(e.model, e.role, e.num_gpus, e.update_weights) for e in engines] == [
        ("actor", "prefill", 2, True),
        ("actor", "decode", 1, True),
        ("actor", "decode", 1, True),
        ("ref", "regular", 4, False),
    ]
    assert prefill.words["disaggregation_mode"] == ["--disaggregation-mode", "prefill"]
    assert decode.words["disaggregation_mode"] == ["--disaggregation-mode", "decode"]
    assert decode.words["cuda_graph_bs_decode"] == ["--cuda-graph-bs-decode", "1", "2"]
    assert "disaggregation_mode" not in ref.words and ref.path == "ref"
    assert ref.parallel == Parallel(4, attention=2) and ref.words["dtype"] == ["--dtype", "float32"]
    assert all(e.words["max_running_requests"][-1] == "7" for e in engines)
    assert max_model_lens(args) == [1000, 512] and args.rollout_num_gpus == 8
    assert json.loads(json.dumps(args.to_dict()))["vllm_topology"]["sglang"][0]["name"] == "actor"


def test_nixl_serves_engines_that_keep_their_memory():
    flags = "--rollout-backend sglang --colocate --actor-num-gpus-per-node 2 --prefill-num-servers 1 --device cuda "
    flags += "--train-backend hf --sglang-disaggregation-transfer-backend "
    with pytest.raises(ConfigError, match=r"(?s)NIXL still has the old memory.*--no-offload-rollout"):
        plan_engines(arguments(flags + "nixl"))
    for kept in ("nixl --no-offload-rollout", "mooncake"):
        engines = plan_engines(arguments(flags + kept))
        savers = ["enable_memory_saver" in engine.own for engine in engines]
        assert savers == [kept == "mooncake"] * 2


def test_simple_flags_for_prefill_and_decode():
    prefill, decode = plan_engines(arguments("--rollout-backend sglang --rollout-num-gpus 2 --prefill-num-servers 1"))
    modes = [engine.words["disaggregation_mode"][-1] for engine in (prefill, decode)]
    assert modes == [prefill.role, decode.role] == ["prefill", "decode"]


@pytest.mark.parametrize(
    "text,where,what",
    [
        ("vllm: []", "groups.yaml, vllm", "unknown key"),
        ("sglang: {}", "groups.yaml, sglang", "is no list of models"),
        ("[", "--sglang-config groups.yaml", "is not YAML"),
        ("{overrides: {tp_size: 2}}", "overrides.tp_size", "follows from an engine's GPUs"),
        ("{overrides: {max_model_len: 2}}", "overrides.max_model_len", "unknown field of SGLang 0.5.17"),
        ("{overrides: {context_lenght: 2}}", "overrides.context_lenght", "did you mean context_length?"),
        ("{overrides: {mem_fraction_static: x}}", "overrides.mem_fraction_static", "is not a number"),
        ("{overrides: 3}", "sglang[0].server_groups[0].overrides", "is no mapping of SGLang's fields"),
        ("{overrides: {dp_size: 2}}", "groups.yaml, sglang[0]", "an engine would have 2 replicas"),
    ],
)
def test_what_is_wrong_in_a_file(text, where, what):
    group = text.replace("{", "{num_gpus: 2, num_gpus_per_engine: 2, ", 1)
    model = f"sglang: [{{name: a, server_groups: [{group}]}}]" if "overrides" in text else text
    Path("groups.yaml").write_text(model)
    told = refusal("--sglang-config groups.yaml")
    assert where in told and what in told and "--sglang-config groups.yaml" in told


def test_the_file_and_other_flags():
    Path("groups.yaml").write_text("sglang: [{name: a, server_groups: [{num_gpus: 2}]}]")
    assert "--sglang-config and --prefill-num-servers" in refusal("--sglang-config groups.yaml --prefill-num-servers 1")
    assert "3, but the groups of groups.yaml take 2" in refusal("--sglang-config groups.yaml --rollout-num-gpus 3")
    assert "use --vllm-config" in refusal("--sglang-config groups.yaml --rollout-backend vllm")
    assert kind_of("sglang").title == "SGLang"
