"""The planned command lines of an engine of two nodes, run as two processes of this host, on real vLLM."""

import json
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.engines.spec import Addresses
from instep.engines.vllm import KIND
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess, stop_all
from tests import keys

PROMPT, NUM_TOKENS = list(range(3, 40)), 8
FLAGS = (
    "--num-gpus-per-node 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 "
    "--rollout-backend vllm --device cpu --vllm-kv-cache-memory-bytes 134217728 --vllm-skip-tokenizer-init "
    "--vllm-distributed-executor-backend mp"
)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="one process per node needs a GPU for each; this is for CPUs")
@pytest.mark.parametrize("more", ["", "--vllm-data-parallel-size 2"], ids=["TP2", "DP2"])
def test_an_engine_of_two_nodes_generates_what_the_model_says(tmp_path, more):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "tiny")
    args = parse([*FLAGS.split(), *more.split(), "--hf-checkpoint", str(tmp_path / "tiny")], "plan")
    (spec,) = plan_engines(args)
    assert len(spec.nodes) == 2
    at = Addresses("127.0.0.1", free_port(), "127.0.0.1", free_port(), free_port())
    processes = []
    try:
        for rank in range(2):
            command = [sys.executable, *KIND.command(args, spec, at, rank)]
            env = KIND.environment(args, spec, at, "127.0.0.1", 1) | {"GLOO_SOCKET_IFNAME": "lo"} | keys.ENVIRONMENT
            processes.append(SupervisedProcess(f"node {rank}", command, tmp_path / f"node-{rank}.log", env))
        wait_ready(f"http://127.0.0.1:{at.port}", processes)
        token_ids, log_probs = generate(f"http://127.0.0.1:{at.port}")
    finally:
        stop_all(processes, grace=10.0)
    expected = greedy(model)
    assert token_ids == expected[0]
    assert log_probs == pytest.approx(expected[1], abs=1e-5)


def wait_ready(url: str, processes: list[SupervisedProcess]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for process in processes:
            assert process.alive(), process.describe() + process.log_tail()
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("not ready\n" + "\n".join(process.log_tail() for process in processes))


def generate(url: str) -> tuple[list[int], list[float]]:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 0}}
    headers = {"Content-Type": "application/json", **keys.HEADERS}
    request = urllib.request.Request(url + "/inference/v1/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM) -> tuple[list[int], list[float]]:
    tokens, log_probs = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        values = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(values.argmax()))
        log_probs.append(float(values.max()))
    return tokens[len(PROMPT) :], log_probs
