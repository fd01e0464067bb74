"""What the client relies on, whatever engine answers (design, section 4): bad input, OpenAI's routes, its process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from instep.engines.embedded.sampling import uniforms
from tests.bounds import allowed
from tests.engines.oracle import oracle
from tests.engines.running import MAX_MODEL_LEN, TOLERANCE, Engine, engine_command, engine_environment, make_checkpoint

# -- bad input


@pytest.mark.parametrize(
    ("body", "words"),  # of which the message has one: engines word it in their own way
    [
        ({"token_ids": [], "sampling_params": {}}, "prompt token_ids"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": "text", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1, 2.5], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [5] * MAX_MODEL_LEN, "sampling_params": {}}, str(MAX_MODEL_LEN)),
        ({"token_ids": [100000], "sampling_params": {}}, "vocabulary"),
        ({"token_ids": [-1], "sampling_params": {}}, "vocabulary token_ids"),
        ({"token_ids": [5], "sampling_parms": {}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"token_ids": [5], "sampling_params": {"min_tokens": 5, "max_tokens": 2}}, "min_tokens"),
        ({"token_ids": [5], "sampling_params": {"stop": [3]}}, "stop"),
        ({"token_ids": [5], "sampling_params": {"stop": ["x"], "detokenize": False}}, "detokenize"),
        ({"token_ids": [5], "sampling_params": 3}, "sampling"),
        (b"{", "JSON"),
        (b"[]", "JSON dictionary"),
    ],
)
def test_bad_requests_get_a_named_400(engine: Engine, body: Any, words: str) -> None:
    status, reply = engine.call("/inference/v1/generate", body)
    assert status == 400 and any(word in reply["error"]["message"] for word in words.split()), reply


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"token_ids": [5], "stream": True}, "stream"),
        ({"token_ids": [5], "sampling_params": {"max_token": 3}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": "3"}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"logprobs": -2}}, "logprobs"),
        ({"token_ids": [5], "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"token_ids": [5], "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids"),  # vLLM 0.32 as well
    ],
)
def test_what_it_cannot_do_or_does_not_know_is_refused(engine: Engine, body: Any, word: str) -> None:
    if not engine.capabilities.strict_requests:
        pytest.skip("vLLM does more, and passes over names that it does not know; the client checks them (`to_vllm`)")
    status, reply = engine.call("/inference/v1/generate", body)
    assert status == 400 and word in reply["error"]["message"], reply


def test_neutral_parameters_of_vllm_are_taken(engine: Engine) -> None:
    params = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "top_k": -1, "stop": None, "logprobs": None}
    reply = engine.ok(
        "/inference/v1/generate", {"token_ids": [5], "stream": False, "sampling_params": params | {"max_tokens": 1}}
    )
    assert reply["choices"][0]["logprobs"] is None


def test_another_model_is_404(engine: Engine) -> None:
    generate = {"token_ids": [5], "sampling_params": {}}
    for route, prompt in (("/inference/v1/generate", generate), ("/v1/completions", {"prompt": [5]})):
        status, reply = engine.call(route, {"model": "another", **prompt})
        assert status == 404 and "another" in reply["error"]["message"]
    assert engine.call("/no_such_route")[0] == 404
    body = {"model": str(engine.path), "token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert engine.ok("/inference/v1/generate", body)["model"] == str(engine.path)


# -- OpenAI's routes


def test_uniforms_are_splitmix64() -> None:
    """Against plain Python integers (Steele, Lea, Flood 2014)."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seeds, positions = [0, 1, 2**63 - 1, 123456789], [0, 1, 77, 10**6]
    want = [
        (mix((mix((s + gamma) & mask) + p * gamma) & mask) >> 24) / 2**40 for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == want


def test_completions(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    body = {"prompt": "3 + 4 =", "temperature": 0, "logprobs": 0, "prompt_logprobs": 0, "return_token_ids": True}
    choice = engine.ok("/v1/completions", body)["choices"][0]
    prompt = tokenizer.encode("3 + 4 =")
    assert choice["prompt_token_ids"] == prompt and 1 <= len(choice["token_ids"]) <= 16
    text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["text"].rstrip("\ufffd") == text.rstrip("\ufffd")  # vLLM leaves out half a character at the end
    want = oracle(engine, prompt + choice["token_ids"]).log_softmax(-1).amax(-1)[len(prompt) - 1 : -1]
    log_probs = choice["logprobs"]
    assert log_probs["token_logprobs"] == pytest.approx(want.tolist(), abs=TOLERANCE)
    assert len(choice["prompt_logprobs"]) == len(prompt)
    assert prompt == [tokenizer.bos_token_id, *tokenizer.encode("3 + 4 =", add_special_tokens=False)]
    bare = engine.ok("/v1/completions", body | {"add_special_tokens": False})["choices"][0]
    assert bare["prompt_token_ids"] == prompt[1:]
    of_slime = engine.ok("/generate", {"text": "3 + 4 =", "sampling_params": {"max_new_tokens": 1}})
    assert of_slime["meta_info"]["prompt_tokens"] == len(prompt) - 1  # as slime's functions tokenize it


def test_chat_completions(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    messages = [{"role": "user", "content": "3 + 4 ="}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
    reply = engine.ok("/v1/chat/completions", body)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert reply["prompt_token_ids"] == prompt
    begun = engine.ok("/v1/chat/completions", body | {"add_special_tokens": True})
    assert begun["prompt_token_ids"] == [tokenizer.bos_token_id, *prompt]
    choice = reply["choices"][0]
    assert choice["token_ids"] == engine.generate(prompt, max_tokens=8, temperature=0)["token_ids"]
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert engine.call("/v1/chat/completions", {"messages": []})[0] == 400


def test_models(engine: Engine) -> None:
    (model,) = engine.ok("/v1/models", method="GET")["data"]
    assert (model["id"], model["max_model_len"]) == (str(engine.path), MAX_MODEL_LEN)


# -- the embedded engine's process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process")
    make_checkpoint(path, tied=True)
    return path


def start(command: list[str], **kwargs: Any) -> subprocess.Popen[str]:
    environment = engine_environment() | kwargs.pop("env", {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, **kwargs)


def refused(command: list[str]) -> str:
    process = start(command)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and len(err.strip().splitlines()) == 1 and not out, (process.returncode, out, err)
    return err


def test_refused_starts_say_one_line_and_exit_2(checkpoint: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused(engine_command("embedded", checkpoint, port))
    assert "config.json is missing" in refused(engine_command("embedded", tmp_path, 0))
    assert (
        "invalid choice: 'float16'"
        in start(engine_command("embedded", checkpoint, 0, dtype="float16")).communicate()[1]
    )
    for config in (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert config["architectures"][0] in refused(engine_command("embedded", tmp_path, 0))
    assert time.monotonic() - begin < allowed(10)  # nothing heavy was loaded


def test_the_life_of_the_process(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused; SIGTERM, a dead parent and a closed lifeline each end the engine.

    Four processes at once, because each spends seconds in imports.
    """
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    command = engine_command("embedded", checkpoint, 0)
    code = f"import subprocess, time; p = subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(120)"
    ours, theirs = socket.socketpair()
    lacking = start(engine_command("embedded", tmp_path, 0))
    terminated = start(command)
    lined = start(command, env={"INSTEP_LIFELINE_FD": str(theirs.fileno())}, pass_fds=[theirs.fileno()])
    parent = start([sys.executable, "-c", code])
    theirs.close()
    child = int(parent.stdout.readline())
    for process in (terminated, lined, parent):
        assert "ready at" in process.stdout.readline()
    terminated.send_signal(signal.SIGTERM)
    ours.close()
    parent.kill()
    assert terminated.wait(timeout=allowed(2)) == 0
    assert lined.wait(timeout=allowed(2)) == 1
    deadline = time.monotonic() + allowed(2)
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    _, err = lacking.communicate(timeout=60)
    assert lacking.returncode == 2 and "model.norm.weight" in err.strip().splitlines()[-1]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
