"""TRL's own `VLLMClient`, of both generations and unmodified, against `instep vllm-serve` and `instep serve`."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from instep.system.ports import free_port
from tests.assets import make_checkpoint
from tests.e2e.test_trl_server import Server, agree, expected
from tests.e2e.trl_sender import Http
from tests.neighbours import trl_client
from tests.neighbours.test_trl_trainer import python_of

HERE = Path(__file__).parent
REFUSED = """
import sys, time
import cpu_as_cuda
from trl.generation.vllm_client import VLLMClient

client, began = VLLMClient(base_url=sys.argv[1], group_port=int(sys.argv[2])), time.monotonic()
try:
    client.init_communicator(device="cpu")
except Exception as error:
    print(error)
print(time.monotonic() - began)
"""
ASYNCHRONOUS = """
import sys
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

PartialState(cpu=True)  # as a trainer makes it
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
weights = {name: weight.data for name, weight in model.named_parameters()}
info = {"names": list(weights), "dtype_names": ["float32"] * len(weights)}
info["shapes"] = [list(weight.shape) for weight in weights.values()]
client = WeightTransferClient(VLLMClient(sys.argv[1]), info)
assert client.vllm.get_server_info()["lora_config"] is None  # else with PEFT it would send adapters
client.init_weight_transfer()
client.pause()
client.send_weights(iter(weights.items()))
client.resume()
client.destroy()
"""


def client_environment(vllm="0.26"):
    """Of a client's process: the stand-in for vLLM of a version first, and nothing of instep."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTEP_")}
    newer = [str(HERE / "stub_vllm_0_31")] if vllm == "0.31" else []
    path = os.pathsep.join([*newer, str(HERE / "stub_vllm"), str(HERE)])
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module", params=[False, True], ids=["vllm-serve", "serve"])
def server(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("trl")
    for i in range(2):
        make_checkpoint(root / f"m{i}", seed=i, head_dim=32)
    with Server(root, "--rollout-backend", "embedded", serve=request.param) as server:
        yield server


# From vLLM 0.28 on TRL sends by other functions of it, and says at once that tensors come in packs.
@pytest.fixture(scope="module", params=[("1.10", "0.26"), ("1.16", "0.26"), ("1.16", "0.31")], ids="-vllm-".join)
def found(request, server, tmp_path_factory):
    """What the client of this version got from the server, beside this vLLM."""
    trl, vllm = request.param
    out = tmp_path_factory.mktemp("client") / "found.json"
    words = [server.url, str(free_port()), str(server.root / "m0"), str(server.root / "m1"), str(out)]
    command = [python_of(trl), str(HERE / "trl_client.py"), *words]
    done = subprocess.run(command, env=client_environment(vllm), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:] + server.output.read_text()
    found = json.loads(out.read_text())
    assert found["vllm"].startswith(vllm)
    return found


def alike(a, b):
    """Equal, with numbers as equal as they are in batches of other sizes."""
    if isinstance(a, list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return a == b or bool(np.isclose(a, b, atol=1e-5))


def of_engine(server, ids, **sampling):
    """The log-probs of sampled tokens as an engine's own OpenAI route has them, to which this request is passed on."""
    choices = Http(server.url)("/v1/completions", {"prompt": ids, "logprobs": 0, **sampling})["choices"]
    return [c["logprobs"]["token_logprobs"] for c in choices]


def test_generate(server, found):
    got, wanted = found["tokens"], trl_client.SAMPLING
    assert got["prompt_ids"] == trl_client.PROMPTS
    assert got["logprob_token_ids"] == [[[i] for i in ids] for ids in got["completion_ids"]]
    sampling = {k: v for k, v in wanted.items() if k != "generation_kwargs"} | wanted["generation_kwargs"]
    for i, prompt in enumerate(trl_client.PROMPTS):
        scores = of_engine(server, prompt, **sampling)
        assert alike([[p[0] for p in row] for row in got["logprobs"][2 * i : 2 * i + 2]], scores)


def test_log_probs_are_as_many_as_asked_for(found):
    assert found["plain"]["logprobs"] is None and found["plain"]["logprob_token_ids"] is None
    top = found["top"]
    assert top["completion_ids"] == found["plain"]["completion_ids"]
    for ids, which, scores in zip(top["completion_ids"], top["logprob_token_ids"], top["logprobs"], strict=True):
        for token, tokens, ranked in zip(ids, which, scores, strict=True):
            assert token in tokens and len(tokens) in (2, 3) and ranked == sorted(ranked, reverse=True)


def test_texts_and_chats_are_those_of_the_tokenizer(server, found):
    assert [len(ids) for ids in found["texts"]["prompt_ids"]] == [3, 1]
    for i, messages in enumerate(trl_client.CHAT):
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        assert found["chat"]["prompt_ids"][i] == Http(server.url)("/v1/chat/completions", body)["prompt_token_ids"]
    assert len(found["chat"]["completion_ids"]) == 4


def test_sequences_are_scored_with_the_weights_that_were_sent(server, found):
    first, other, again = (found[key] for key in ("before", "after 0", "after 1"))
    assert alike(first["actual_logprobs"], again["actual_logprobs"])
    assert not alike(first["actual_logprobs"], other["actual_logprobs"])
    assert [[p[0] for p in row] for row in other["actual_token_ids"]] == [p[1:] for p in trl_client.PROMPTS]
    assert all(alike(found["tokens"][key], found["tokens again"][key]) for key in found["tokens"])


def test_a_refusal_says_what_is_wrong(found):
    assert "no_such_thing: this server does not accept" in found["refusal"] and "400" in found["refusal"]


@pytest.mark.parametrize("trl", ["1.10", "1.16"])
def test_a_second_trainer_is_told_so_at_once(server, trl):
    """In the real group TRL >= 1.11 would wait for NCCL without a bound, here for as long as the stand-in waits."""
    python, first = python_of(trl), server.sender(legacy=trl == "1.10")
    words = [python, "-c", REFUSED, server.url, str(free_port())]
    done = subprocess.run(words, env=client_environment(), capture_output=True, text=True, timeout=120)
    first.close()
    told, seconds = done.stdout.strip().splitlines()
    assert "409" in told and "has the weight group since" in told and float(seconds) < 10, done.stdout + done.stderr


@pytest.mark.parametrize("vllm", ["0.26", "0.31"])
def test_the_client_of_asynchronous_trainers_sends_weights_in_a_pause(server, vllm):
    words = [python_of("1.16"), "-c", ASYNCHRONOUS, server.url, str(server.root / "m1")]
    done = subprocess.run(words, env=client_environment(vllm), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:] + server.output.read_text()
    assert agree(server.scores(), expected(server.root, "m1"))
    assert not Http(server.url)("/is_paused", method="GET")["is_paused"]
