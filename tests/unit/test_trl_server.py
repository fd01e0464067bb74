"""The parts of `instep vllm-serve` by themselves: its command line, the forms of texts, and what may be sent."""

import base64
import json
import math
import shlex
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.engines.kind import served_dtype
from instep.errors import ConfigError, SyncError
from instep.models.checkpoint_names import named_weights
from instep_engine.manifest import digest
from instep_neighbours.trl import forms
from instep_neighbours.trl.clients import Access, BadRequest, sends
from instep_neighbours.trl.command_line import FLAGS, help_text, read
from instep_neighbours.trl.forms import Asked, Scoring
from instep_neighbours.trl.receiver import Announced, Receiver, WrongTensor, cuts
from instep_neighbours.trl.serve import _layout, vllm_serve
from instep_neighbours.trl.staging import Incoming, Layout, Slot
from tests.assets import make_checkpoint
from tests.families import make_family


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("m") / "hf")


@pytest.fixture(scope="module")
def layout(checkpoint):
    return Layout.of(checkpoint, torch.float32, 30_000)


# ---- the command line ------------------------------------------------------------------------------------------------

SEED = """--model MODEL --tensor_parallel_size 2 --data-parallel-size 2 --host 127.0.0.1 --port 8001 --dtype bfloat16
--gpu_memory_utilization 0.8 --max_model_len 64 --enable_prefix_caching False --enforce_eager True --log_level warning
--kv_cache_dtype auto --trust_remote_code False --vllm_model_impl transformers --distributed_executor_backend mp
--speculative_config {"method":"ngram"}"""


@pytest.mark.parametrize("dashes", [False, True])
def test_every_flag_of_the_seed_is_read(dashes, checkpoint):
    words = SEED.replace("MODEL", str(checkpoint)).split()
    words = [w.replace("_", "-") if dashes and w.startswith("--") else w for w in words]
    serving = read([*words, "--rollout-backend", "vllm"])
    args = parse(serving.words, "serve")
    assert (args.rollout_num_gpus, args.rollout_num_gpus_per_engine, args.port, args.precision) == (4, 2, 8001, "bf16")
    assert (serving.host, serving.log_level) == ("127.0.0.1", "warning")
    assert args.vllm_max_model_len == 64 and args.hf_checkpoint == str(checkpoint)
    given = {name: words[-1] for name, words in args.vllm_overrides.items()}
    assert given["gpu_memory_utilization"] == "0.8" and given["model_impl"] == "transformers"
    assert given["enable_prefix_caching"] == "--no-enable-prefix-caching" and "enforce_eager" in given
    assert not {"kv_cache_dtype", "trust_remote_code"} & given.keys() and given["distributed_executor_backend"] == "mp"


def test_flags_of_serve_and_equals_signs_are_taken():
    words = read(["--model=m", "--run-dir", "r", "--no-api-key", "--data_parallel_size=3"]).words
    assert words == [
        *["--run-dir", "r", "--no-api-key", "--hf-checkpoint", "m"],
        *["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "1"],
    ]


TRL_1_11 = (
    """MODEL --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1"""
)


def test_the_command_that_trl_1_11_documents_is_taken(checkpoint):
    words = shlex.split(TRL_1_11.replace("MODEL", str(checkpoint)))
    more = "--rollout-backend vllm --max_num_seqs 4 --no-async-scheduling --compilation-config.mode=3 --seed 7".split()
    args = parse(read([*words, *more]).words, "serve")
    assert args.hf_checkpoint == str(checkpoint) and args.seed == 7 and args.vllm_max_num_seqs == 4
    assert args.vllm_overrides == {
        "async_scheduling": ["--no-async-scheduling"],
        "compilation_config.mode": ["--compilation-config.mode", "3"],
    }
    assert parse(read([*words, "--rollout-backend", "embedded"]).words, "serve").hf_checkpoint == str(checkpoint)


def test_errors_name_the_command_that_was_typed():
    with pytest.raises(ConfigError) as raised:
        vllm_serve(["m", "--nonsense", "--served-model-name", "x"])
    told = str(raised.value)
    assert "where:  instep vllm-serve" in told and "`instep vllm-serve --help` explains" in told
    assert "`instep serve" not in told and "an engine serves the trained model" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ('--weight-transfer-config {"backend":"ipc"}', "by the group that TRL's trainers make; remove it"),
        ("--weight-transfer-config nccl", "is not JSON"),
        ("--logprobs-mode raw_logprobs", "the sampling distribution"),
        ("--revision", "needs one value"),
        ("--config file.yaml", "as flags"),
        ("--dtype int8", "'int8' is not supported"),
        ("--tensor_parallel_size 0", "not a whole number above 0"),
        ("--enforce_eager maybe", "neither true nor false"),
        ("--host 0.0.0.0", "give --api-key-file FILE"),
        ("--host", "needs one value"),
        ("--distributed_executor_backend ray", "one host"),
        ("--speculative_config {", "is not JSON"),
        ("--log_level loud", "not one of critical"),
        ("--sync-timeout never", "number of seconds"),
    ],
)
def test_wrong_flags_say_what_to_do(words, says):
    with pytest.raises(ConfigError, match=says):
        read(["--model", "m", *words.split()])
    with pytest.raises(ConfigError, match="named already: m"):
        read(["m", "--model", "n"])


def test_float16_is_served_by_vllm_alone(checkpoint):
    words = read(["--model", str(checkpoint), "--dtype", "half", "--device", "cpu"]).words
    args = parse([*words, "--rollout-backend", "vllm"], "serve")
    assert served_dtype(args) == "float16" and {p.dtype for p in _layout(args).places.values()} == {"float16"}
    with pytest.raises(ConfigError, match="the embedded engine computes in float32 or bfloat16"):
        parse([*words, "--rollout-backend", "embedded"], "serve")
    with pytest.raises(ConfigError, match="need a loss scale"):
        parse(["--hf-checkpoint", str(checkpoint), "--vllm-dtype", "float16", "--num-rollout", "1"], "train")


def test_another_host_is_open_only_when_that_is_said():
    assert read("--host 0.0.0.0 --no-api-key".split()).host == "0.0.0.0"
    assert not read("--host 10.0.0.7 --api-key-file f".split()).on_loopback
    assert read("--host localhost".split()).on_loopback and read("--host ::1".split()).on_loopback


def test_the_help_has_every_flag():
    text = help_text().replace("-", "_")
    assert all(f"__{name} " in text for name in FLAGS), text


def test_a_key_comes_as_a_bearers_or_as_a_password():
    basic = base64.b64encode(b"user:secret").decode()
    assert sends("Bearer secret", "secret") and sends(f"Basic {basic}", "secret")
    wrong = ["", "secret", "Bearer other", "Basic secret", "Basic !", f"Basic {base64.b64encode(b'secret').decode()}"]
    assert not any(sends(header, "secret") for header in wrong)


@pytest.mark.parametrize(
    ("access", "expected"),
    [  # of no key, of one for generation, of one for all; at a route that reads, and at one of weights
        (Access(""), [(None,) * 3] * 2),
        (Access("all"), [(401, 401, None)] * 2),
        (Access("all", "client", "F"), [(401, None, None), (401, 403, None)]),
        (Access("all", "*", "F"), [(None,) * 3, (401, 401, None)]),
    ],
)
def test_who_may_call_what(access, expected):
    for path, statuses in zip(("/generate/", "/update_weights"), expected, strict=True):
        answers = [access.refusal(path, header) for header in ("", "Bearer client", "Bearer all")]
        assert tuple(answer and answer[0] for answer in answers) == statuses
        assert path == "/generate/" or all("F" in answer[1] for answer in answers if answer and access.key_file)
    assert access.refusal("/health/", "") is None


# ---- texts -----------------------------------------------------------------------------------------------------------


def choice(ids, tops):
    """A choice as vLLM 0.32 answers it: at each token (id, log-prob) of itself, then of the likeliest."""
    content = [
        {"token_id": i, "logprob": top[0][1], "top_logprobs": [{"token_id": t, "logprob": p} for t, p in top]}
        for i, top in zip(ids, tops, strict=True)
    ]
    return {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None}


def test_one_more_log_prob_is_asked_for_than_the_client_wants():
    """As vLLM counts the sampled token among them, and TRL does not."""
    assert Asked.of({"logprobs": 0}).params["logprobs"] == 0
    assert Asked.of({"logprobs": 3}).params["logprobs"] == 4
    assert "logprobs" not in Asked.of({"logprobs": None}).params


def test_entries_are_the_token_itself_and_the_likeliest_in_order():
    inside = choice([7], [[(7, -1.0), (5, -0.5), (9, -2.0)]])
    outside = choice([7], [[(7, -9.0), (5, -0.5), (9, -1.0)]])
    assert forms.tokens_of(inside, 2) == [[(5, -0.5), (7, -1.0)]]
    assert forms.tokens_of(outside, 2) == [[(5, -0.5), (9, -1.0), (7, -9.0)]]
    assert forms.tokens_of(outside, 0) == [[(7, -9.0)]]
    older = choice([7], [[(7, -1.0)]])
    older["logprobs"]["content"][0]["top_logprobs"] = [{"token": "token_id:8", "logprob": -0.1}]
    assert forms.tokens_of(older, 1) == [[(8, -0.1), (7, -1.0)]]


def test_what_is_not_a_number_is_null():
    answers = [{"choices": [choice([7], [[(7, math.nan)]])]}]
    answer = forms.legacy_answer({"logprobs": 0}, [[1]], answers, Asked.of({"logprobs": 0}))
    assert answer["logprobs"] == [[[None]]] and answer["logprob_token_ids"] == [[[7]]]
    assert forms.legacy_answer({}, [[1]], answers, Asked.of({"logprobs": 0}))["logprobs"] == [[None]]
    for body in ({"logprobs": None}, {}):
        assert forms.legacy_answer(body, [[1]], answers, Asked.of({}))["logprobs"] is None


def test_generation_kwargs_win_and_unknown_ones_are_refused():
    body = {"n": 2, "generation_kwargs": {"n": 3, "seed": 1}, "structured_outputs_regex": "a+"}
    asked = forms.legacy_asked(body, forms.LEGACY_GENERATE)
    assert asked.params["n"] == 3 and asked.params["seed"] == 1
    assert asked.params["structured_outputs"] == {"regex": "a+"}
    for wrong in ({"generation_kwargs": {"tempreature": 1}}, {"tempreature": 1}):
        with pytest.raises(BadRequest, match="tempreature"):
            forms.legacy_asked(wrong, forms.LEGACY_CHAT)


TRL_0_18 = {"n": 2, "repetition_penalty": 1.0, "temperature": 0.9, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
TRL_0_18 |= {"max_tokens": 16, "guided_decoding_regex": "a+"}
TRL_0_25 = TRL_0_18 | {"truncate_prompt_tokens": 2, "generation_kwargs": {}}
TRL_0_28 = {name: value for name, value in TRL_0_25.items() if name != "guided_decoding_regex"}
TRL_0_28 |= {"structured_outputs_regex": "a+"}
TRL_1_10 = {name: value for name, value in TRL_0_28.items() if name != "truncate_prompt_tokens"} | {"logprobs": 0}
CHAT = {"messages": [[{"role": "user", "content": "12"}]], "chat_template_kwargs": {}}


@pytest.mark.parametrize(
    ("body", "known", "cut", "logprobs"),
    [
        ({"prompts": ["12"], **TRL_0_18}, forms.LEGACY_GENERATE, [1, 2, 3], [-0.5]),
        ({"prompts": ["12"], "images": None, **TRL_0_25}, forms.LEGACY_GENERATE, [2, 3], [-0.5]),
        ({**CHAT, **TRL_0_25}, forms.LEGACY_CHAT, [2, 3], [-0.5]),
        ({"prompts": ["12"], "images": None, **TRL_0_28}, forms.LEGACY_GENERATE, [2, 3], [-0.5]),
        ({**CHAT, **TRL_0_28}, forms.LEGACY_CHAT, [2, 3], [-0.5]),
        ({"prompts": ["12"], "images": None, **TRL_1_10}, forms.LEGACY_GENERATE, [1, 2, 3], [[-0.5]]),
        ({**CHAT, "tools": None, **TRL_1_10}, forms.LEGACY_CHAT, [1, 2, 3], [[-0.5]]),
    ],
    ids=["0.18", "0.25", "0.25-chat", "0.28", "0.28-chat", "1.10", "1.10-chat"],
)
def test_each_generation_of_trls_clients_gets_its_own_answer(body, known, cut, logprobs):
    asked = forms.legacy_asked(body, known)
    assert (asked.params["n"], asked.params["temperature"]) == (2, 0.9)
    assert asked.params["structured_outputs"] == {"regex": "a+"}
    prompts = forms.legacy_cut(body, [[1, 2, 3]])
    answer = forms.legacy_answer(body, prompts, [{"choices": [choice([7], [[(7, -0.5)]])]}], asked)
    assert answer["prompt_ids"] == [cut] and answer["completion_ids"] == [[7]] and answer["logprobs"] == [logprobs]


@pytest.mark.parametrize("last", [0, -1, True, "2"])
def test_a_prompt_is_cut_to_a_whole_number_of_tokens(last):
    with pytest.raises(BadRequest, match="truncate_prompt_tokens must be null or a whole number above 0"):
        forms.legacy_cut({"truncate_prompt_tokens": last}, [[1, 2, 3]])


def test_sequences_are_scored_in_padded_arrays():
    place = {"3": {"logprob": -2.0, "rank": 5}, "8": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.0, "rank": 2}}
    other = {"8": {"logprob": math.nan, "rank": 1}}
    scoring = Scoring.of(
        {"sequences": [[1, 2, 3], [4, 8]], "prompt_lengths": [2, 1], "top_logprobs": 2, "response_format": "binary"}
    )
    answer = scoring.answer([{"prompt_logprobs": [None, {}, place]}, {"prompt_logprobs": [None, other]}])
    arrays = {
        name: np.frombuffer(base64.b64decode(answer[f"{name}_b64"]), kind).tolist()
        for name, kind in (("logprobs", np.float32), ("token_ids", np.int32), ("actual_logprobs", np.float32))
    }
    assert answer["shape"] == [2, 1, 2] and answer["completion_lengths"] == [1, 1]
    assert arrays["logprobs"] == [-0.5, -1.0, -math.inf, -math.inf] and arrays["token_ids"] == [8, 9, 8, 0]
    assert arrays["actual_logprobs"] == [-2.0, -math.inf]


@pytest.mark.parametrize(
    "body",
    [
        {"sequences": [[1]], "prompt_lengths": []},
        {"sequences": [[1]], "prompt_lengths": [2]},
        {"sequences": "x", "prompt_lengths": [1]},
        {"sequences": [[1]], "prompt_lengths": [1], "top_logprobs": 0},
        {"sequences": [[1]], "prompt_lengths": [1], "response_format": "yaml"},
    ],
)
def test_wrong_sequences_are_refused(body):
    with pytest.raises(BadRequest):
        Scoring.of(body)


# ---- weights ---------------------------------------------------------------------------------------------------------


def tensors(*sizes):
    return [Announced(str(i), "bfloat16", (size,), "float32") for i, size in enumerate(sizes)]


def test_packed_buffers_end_with_the_tensor_that_crosses_the_limit():
    """vLLM's senders flush when the sum exceeds the limit, so that a buffer may be just the limit and go on."""
    parts = [[int(one.name) for one in part] for part in cuts(tensors(10, 40, 1, 60, 2, 3), 100)]
    assert parts == [[0, 1, 2], [3], [4, 5]]
    assert [len(part) for part in cuts(tensors(1, 2, 3), None)] == [1, 1, 1] and cuts([], 100) == []


def test_names_of_the_checkpoint_are_taken_once_with_their_shape(layout):
    incoming = Incoming(layout)
    name, place = next(iter(layout.places.items()))
    assert incoming.announce(name, "torch.bfloat16", place.shape).served == "float32"
    wrong = [(name, "float32", place.shape, "came twice"), ("model.x", "float32", (1,), "not a weight of this model")]
    wrong += [("model.norm.weight", "float32", (3,), r"has shape \[3\], the model's has \[64\]")]
    wrong += [
        ("model.norm.weight", "int8", (64,), "is of int8"),
        ("model.norm.weight", "word", (64,), "not a torch dtype"),
    ]
    for name, dtype, shape, says in wrong:
        with pytest.raises(WrongTensor, match=says):
            incoming.announce(name, dtype, shape)
    assert len(incoming.missing) == len(layout.places) - 1 and incoming.begun


def test_a_tied_weight_may_come_and_must_be_what_it_is_tied_to(layout):
    incoming = Incoming(layout)
    embed, place = "model.embed_tokens.weight", layout.places["model.embed_tokens.weight"]
    assert layout.tied == {"lm_head.weight": embed}
    tied = incoming.announce("lm_head.weight", "float32", place.shape)
    assert not tied.places and not incoming.begun
    incoming.take(tied, ["digest"], True)
    incoming.take(incoming.announce(embed, "float32", place.shape), ["another"], True)
    with pytest.raises(SyncError, match="lm_head.weight differs from model.embed_tokens.weight"):
        incoming.check_tied()
    later = Incoming(layout)  # a state dict has it at the end, after the update that it belongs to
    later.take(later.announce("lm_head.weight", "float32", place.shape), ["another"], True)
    later.forget_tied(incoming.records)
    assert not later.announced and not later.tied


def test_weights_that_are_not_finite_are_refused(layout):
    incoming = Incoming(layout)
    norm = incoming.announce("model.norm.weight", "float32", (64,))
    with pytest.raises(SyncError, match="model.norm.weight is not finite in float32"):
        incoming.take(norm, ["digest"], False)


def test_a_slot_has_room_for_every_weight_and_no_two_at_one_place(layout, tmp_path):
    slot = Slot(layout, tmp_path, "a")
    slot.allocate()
    assert [path.stat().st_size for path in slot.paths] == layout.sizes and len(layout.sizes) > 2
    ends = dict.fromkeys(range(len(layout.sizes)), 0)
    for place in layout.places.values():
        assert place.offset >= ends[place.number] and place.offset % 64 == 0
        ends[place.number] = place.offset + place.nbytes
    assert all(ends[i] <= size for i, size in enumerate(layout.sizes))


def test_a_server_that_takes_no_weights_says_why(checkpoint, tmp_path):
    args = parse(["--hf-checkpoint", str(checkpoint), "--device", "cpu"], "serve")
    assert _layout(args).places and not _layout(args).refusal
    config = json.loads((checkpoint / "config.json").read_text())
    for more, says in (
        ({"quantization_config": {}}, ""),
        ({"quantization_config": {"a": 1}}, "are quantized"),
        ({"model_type": "of_nobody"}, "transformers cannot build"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        shutil.copy(checkpoint / "model.safetensors", tmp_path)
        layout = _layout(args.replace(hf_checkpoint=str(tmp_path)))
        assert (says in layout.refusal) if says else not layout.refusal


def test_fused_experts_are_taken_apart(tmp_path):
    """As transformers' own mapping does it: a trainer sends one tensor, engines get those of the checkpoint."""
    folder = make_family("qwen3_moe", tmp_path / "hf")
    layout, model = Layout.of(folder, torch.bfloat16, 30_000), AutoModelForCausalLM.from_pretrained(folder)
    slot, incoming, receiver = Slot(layout, tmp_path, "a"), Incoming(layout), Receiver()
    slot.allocate()
    fused = {name: places for name, (_, places) in layout.taken.items() if len(places) > 1}
    assert len(fused) == 4
    with pytest.raises(WrongTensor, match="has shape"):
        incoming.announce(next(iter(fused)), "float32", (1,))
    for name, tensor in named_weights(model).items():
        one = incoming.announce(name, "float32", tuple(tensor.shape))
        incoming.take(one, *receiver._take(one, slot.paths, tensor.detach().reshape(-1).view(torch.uint8)))
    expected = load_file(folder / "model.safetensors")
    assert not incoming.missing and incoming.records.keys() == expected.keys() and len(expected) > len(fused)
    for name, place in layout.places.items():
        data = slot.paths[place.number].read_bytes()[place.offset :][: place.nbytes]
        held = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(place.shape)
        assert torch.equal(held, expected[name].bfloat16()) and incoming.records[name].digest == digest(data), name
    part, *_ = next(iter(fused.values()))
    with pytest.raises(WrongTensor, match="came twice"):
        incoming.announce(part.name, "float32", part.shape)


def test_fused_experts_of_another_form_are_refused_by_name():
    layout = Layout(taken={"experts.gate_up_proj": ((1,), ())})
    with pytest.raises(WrongTensor, match="joins several tensors of the checkpoint"):
        Incoming(layout).announce("experts.gate_up_proj", "float32", (1,))
