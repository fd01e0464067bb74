"""`instep serve`: engines behind a router, asked with the openai package, killed, and ended."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from instep.system.ports import free_port, free_ports
from instep_engine.guard import ATROPOS_ROUTES
from tests.assets import make_checkpoint
from tests.e2e.commands import ENVIRONMENT, gone_within, on_sglang, on_vllm, run, words_of
from tests.e2e.trl_sender import Http, Refusal, Sender, weights_of
from tests.engines.route_fuzz import GENERATION, OF_TRL, fuzz

HELLO = [{"role": "user", "content": "12+30=?"}]


class Server:
    """A running `instep serve` and its client."""

    def __init__(self, root, *more):
        self.model, self.run_dir, self.more = str(root / "hf"), root / f"serve-{free_port()}", more
        self.output = root / f"{self.run_dir.name}.out"
        self.start()

    def start(self):
        import openai

        self.port = free_ports(2)
        command = [sys.executable, "-m", "instep.cli", "serve", "--hf-checkpoint", self.model]
        command += ["--port", str(self.port), "--run-dir", str(self.run_dir), "--num-threads", "2"]
        command += ["--device", "cpu", *self.more]
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=out)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=lambda: self.key, timeout=60, max_retries=30
        )

    @property
    def key(self):
        return (self.run_dir / "api_key").read_text().strip()

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, text, seconds=240.0):
        deadline = time.monotonic() + seconds
        while text not in self.text:
            if self.process.poll() is not None and "is taken" in self.text:  # by somebody, since it was chosen
                self.start()
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return self

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self, index):
        """The process of an engine, found by the address in the table."""
        port = re.search(rf"engine {index}.*?http://127.0.0.1:(\d+)", self.text, re.DOTALL)[1]
        words = [(p, words_of(p)) for p in psutil.Process(self.process.pid).children(recursive=True)]
        return next(p for p, w in words if "--port" in w and w[w.index("--port") + 1] == port and "router" not in w[2])

    def ask(self, **more):
        return self.client.chat.completions.create(model=self.model, messages=HELLO, max_tokens=8, **more)

    def end(self, number=signal.SIGINT):
        """Exit code; whatever it had started has ended, too."""
        family = self.family()
        self.process.send_signal(number)
        code = self.process.wait(240)
        assert gone_within(family, 5)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(240)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with `hf/`, whose heads vLLM has on a CPU."""
    root = tmp_path_factory.mktemp("served")
    make_checkpoint(root / "hf", head_dim=32)
    (root / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    return root


EMBEDDED = ["--rollout-backend", "embedded", "--rollout-num-gpus", "2"]
VLLM = on_vllm(trainer=False)
OF_SGLANG = [pytest.mark.sglang, pytest.mark.sglang_router, pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            ["--rollout-backend", "embedded", "--rollout-num-gpus", "2"], id="embedded", marks=pytest.mark.router
        ),
        pytest.param(VLLM, id="vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param(on_sglang(2), id="sglang", marks=OF_SGLANG),
    ],
)
def served(request, root):
    with Server(root, *request.param, "--chat-template", str(root / "plain.jinja")) as server:
        yield server.wait_for("Ctrl-C ends it")
        assert server.end() == 0, server.text


def test_it_says_what_it_serves(served):
    assert f"http://127.0.0.1:{served.port}/v1" in served.text and str(served.run_dir / "logs")[:20] in served.text
    assert f"curl http://127.0.0.1:{served.port}/v1/chat/completions" in served.text
    assert {"engine-0.log", "router.log"} <= {path.name for path in (served.run_dir / "logs").iterdir()}
    command = re.search(r"^curl .*$", served.text, re.MULTILINE)[0]
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert '"content"' in done.stdout, done


def test_models(served):
    (model,) = served.client.models.list().data
    assert model.id == served.model and model.object == "model"


def test_chat(served):
    answer = served.ask(logprobs=True, n=3, seed=5, temperature=1.0)
    assert answer.object == "chat.completion" and answer.model == served.model and answer.created > 0
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    contents = {choice.message.content for choice in answer.choices}
    assert len(contents) > 1 and {choice.message.role for choice in answer.choices} == {"assistant"}
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert 1 <= len(entries) <= 8 and all(entry.logprob <= 0 for entry in entries)
        written = "".join(entry.token for entry in entries)
        assert re.sub(r"<\|?\w+\|?>", "", written) == choice.message.content, written  # special tokens are left out
        assert choice.finish_reason == ("length" if len(entries) == 8 else "stop")
    if "embedded" not in served.text:
        (first, *_) = served.ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert 2 <= len(first.top_logprobs) <= 3
    else:
        import openai

        with pytest.raises(openai.BadRequestError, match="top_logprobs=2 is not supported"):
            served.ask(logprobs=True, top_logprobs=2)
    newer = served.client.chat.completions.create(model=served.model, messages=HELLO, max_completion_tokens=3)
    assert newer.usage.completion_tokens <= 3


def test_greedy_is_the_same_in_both_routes_and_as_transformers(served):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.model)
    tokenizer.chat_template = (Path(served.model).parent / "plain.jinja").read_text()
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert served.ask(temperature=0).choices[0].message.content == text
    answer = served.client.completions.create(
        model=served.model, prompt=prompt, max_tokens=8, temperature=0, logprobs=0
    )
    assert answer.object == "text_completion" and answer.choices[0].text == text
    scores = torch.log_softmax(model(torch.cat([ids[0], out])[None]).logits[0].float(), -1)
    expected = [scores[ids.shape[1] + i - 1, token].item() for i, token in enumerate(out)]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert len(answer.choices[0].logprobs.tokens) == len(out)


def test_random_requests(served):
    """To the public address: no 500, no hang, and the engines answer as before."""
    if "embedded" not in served.text:
        pytest.skip("of the embedded engine")
    before = served.ask(temperature=0).choices[0].message.content
    for routes in (GENERATION, OF_TRL):
        fuzz(f"http://127.0.0.1:{served.port}", 3, 100, routes, headers={"Authorization": f"Bearer {served.key}"})
    assert served.ask(temperature=0).choices[0].message.content == before
    for name in ("engine-0", "engine-1"):
        assert "Traceback" not in (served.run_dir / "logs" / f"{name}.log").read_text()
    assert "died" not in served.text and "Traceback" not in served.text


def test_stop(served):
    text = served.ask(temperature=0).choices[0].message.content
    stopped = served.ask(temperature=0, stop=[text[2]]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(text[2])]


def test_a_mistake_is_a_bad_request_with_its_reason(served):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        served.ask(temperature=-1)
    with pytest.raises(openai.BadRequestError, match="500 tokens|128"):
        served.client.completions.create(model=served.model, prompt="1" * 500, max_tokens=1)
    if "sglang" in served.text:  # it takes any name
        return
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        served.client.completions.create(model="no-such-model", prompt="1", max_tokens=1)


def test_streaming(served):
    chunks = list(served.ask(stream=True, temperature=0))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(chunks) > 2 and text == served.ask(temperature=0).choices[0].message.content
    asked = {"prompt": "1+1=", "max_tokens": 8, "temperature": 0}
    pieces = list(served.client.completions.create(model=served.model, **asked, stream=True))
    whole = served.client.completions.create(model=served.model, **asked).choices[0]
    assert len(pieces) > 2 and "".join(piece.choices[0].text for piece in pieces) == whole.text
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason


@pytest.fixture(scope="module")
def other(root):
    """The model with other weights, for a trainer that sends them."""
    make_checkpoint(root / "other", seed=1, head_dim=32)
    return weights_of(root / "other")


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "new"])
def test_a_trainer_of_trls_asks_and_sends_weights(served, root, other, legacy):
    """Texts are divided among the engines, weights reach all of them, and the control key alone opens weights."""
    if "sglang" in served.text:
        pytest.skip("SGLang answers OpenAI's clients and its own")
    control = (served.run_dir / "control_key").read_text().strip()
    at = {who: f"http://user:{key}@127.0.0.1:{served.port}" for who, key in (("us", control), ("client", served.key))}
    texts = {"prompts": ["12+"] * 8, "max_tokens": 6, "temperature": 0.0}
    before = Http(at["client"])("/generate/", texts)["completion_ids"]
    assert len(before) == 8 and all(ids == before[0] for ids in before)
    for route in ("/init_communicator/", "/init_weight_transfer_engine", "/update_weights", "/pause", "/bridge/pause"):
        assert Http(at["client"]).status(route) == 403 and Http(at["us"].replace(control, "x")).status(route) == 401
    sender = Sender(at["us"], free_port(), legacy)
    sender.join()
    for weights, same in ((other, False), (weights_of(root / "hf"), True)):
        sender.send(weights)
        sender.end()
        after = Http(at["client"])("/generate/", texts)["completion_ids"]
        assert all(ids == after[0] for ids in after) and (after == before) == same
    sender.close()
    count = int(re.search(r"starting (\d) ", served.text)[1])
    assert re.search(rf"version \d+: \d+ tensors, .* at {count} engines? in", served.text)


def test_atropos_server_is_there(served):
    """Its `/generate`, also through a router, and the routes of its state."""
    if "sglang" in served.text:
        pytest.skip("SGLang's /generate has another form")
    client = Http(f"http://user:{served.key}@127.0.0.1:{served.port}")
    control = Http(f"http://user:{(served.run_dir / 'control_key').read_text().strip()}@127.0.0.1:{served.port}")
    state = {path: client(path, method="GET") for path in ATROPOS_ROUTES}
    assert state["/bridge/info"]["model_name"] == served.model and not state["/lora/status"]["lora_available"]
    assert state["/bridge/state_dict_info"]["dtype"] == "torch.float32" and state["/health_generate"] == {}
    assert {"path": "/lora/load", "methods": ["POST"]} in state["/bridge/list_endpoints"]["endpoints"]
    answer = client("/generate", {"prompt": {"prompt_token_ids": [5, 6]}, "n": 2, "max_tokens": 4, "logprobs": 0})
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 2 and answer["prompt_token_ids"] == [5, 6]
    assert client.status("/generate", {"prompt": 3}) == 400
    assert control("/bridge/pause?mode=keep") == {"status": "paused"}
    assert client("/bridge/is_paused", method="GET") == {"paused": True}
    assert client.status("/health_generate", method="GET") == 503
    assert control("/bridge/resume") == {"status": "resumed"} and served.ask(temperature=0).choices
    assert [control.status(f"/{route}") for route in ("bridge/sleep", "lora/load", "lora/unload")] == [400, 400, 200]


@pytest.mark.parametrize(
    "served", [pytest.param(on_sglang(2), id="sglang", marks=OF_SGLANG)], indirect=True, scope="module"
)
def test_sglangs_own_form_reaches_it_whole(served):
    """Also `logit_bias`, which sglang-router drops. A request of TRL's client is refused with a remedy."""
    client = Http(f"http://user:{served.key}@127.0.0.1:{served.port}")
    params = {"max_new_tokens": 4, "temperature": 0, "logit_bias": {"7": 1000.0}}
    answer = client("/generate", {"input_ids": [5, 6], "sampling_params": params})
    assert answer["output_ids"] == [7] * 4
    with pytest.raises(Refusal, match="use --rollout-backend vllm or embedded"):
        client("/generate/", {"prompts": ["12+"], "max_tokens": 6})


def kill_one(server, index):
    """Clients notice nothing of it that their own retries do not mend."""
    before = server.ask(temperature=0).choices[0].message.content
    server.engine(index).kill()
    for _ in range(20):
        assert server.ask(temperature=0).choices[0].message.content == before
    server.wait_for(f"engine {index} serves again")
    assert server.ask(temperature=0).choices[0].message.content == before
    assert f"engine {index} died (SIGKILL): it is restarted" in server.text


@pytest.mark.router
def test_a_killed_engine_comes_back(root):
    with Server(root, "--rollout-backend", "embedded", "--rollout-num-gpus", "2") as server:
        server.wait_for("Ctrl-C ends it")
        kill_one(server, 1)
        assert server.end(signal.SIGTERM) == 0, server.text


@pytest.mark.slow
def test_the_only_engine_comes_back(root):
    """Without a router; while it is away a client waits for it."""
    with Server(root, "--rollout-backend", "embedded") as server:
        server.wait_for("Ctrl-C ends it")
        assert "router.log" not in os.listdir(server.run_dir / "logs")
        kill_one(server, 0)
        assert server.end() == 0, server.text


@pytest.mark.slow
def test_several_models(root, tmp_path):
    """Each at an address of its own."""
    make_checkpoint(tmp_path / "ref", seed=1)
    groups = [{"worker_type": "regular", "num_gpus": 1}]
    ref = {"name": "ref", "model_path": str(tmp_path / "ref"), "update_weights": False, "server_groups": groups}
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"vllm": [{"name": "actor", "server_groups": groups}, ref]}))
    with Server(root, "--rollout-backend", "embedded", "--vllm-config", str(config)) as server:
        server.wait_for("Ctrl-C ends it")
        assert f"http://127.0.0.1:{server.port + 1}/v1" in server.text
        import openai

        other = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port + 1}/v1", api_key=server.key)
        assert [model.id for client in (server.client, other) for model in client.models.list().data] == [
            server.model,
            ref["model_path"],
        ]
        assert (
            Http(f"http://x:{server.key}@127.0.0.1:{server.port}").status("/bridge/info", method="GET") == 404
        )  # gates
        assert server.end() == 0, server.text


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_vllm_comes_back(root):
    with Server(root, *VLLM) as server:
        server.wait_for("Ctrl-C ends it")
        kill_one(server, 0)
        assert server.end() == 0, server.text


def test_nothing_outlives_a_killed_server(root):
    with Server(root, "--rollout-backend", "embedded") as server:
        server.wait_for("Ctrl-C ends it")
        family = server.family()
        assert len(family) == 3  # the fork server and the engine's two processes
        server.process.kill()
        assert gone_within(family, 5)


def test_an_interrupt_before_it_is_ready(root):
    with Server(root, "--rollout-backend", "embedded") as server:
        server.wait_for("starting 1 embedded engine")
        assert server.end() == 130 and "interrupted" in server.text and "Traceback" not in server.text


def refusal(root, run_dir, *more, model="hf"):
    given = ["serve", "--hf-checkpoint", str(root / model), "--run-dir", str(run_dir), "--device", "cpu"]
    done = run([*given, *more])
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_one_error(root, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(root / "hf", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    code, error = refusal(tmp_path, tmp_path / "run", "--rollout-backend", "embedded", "--port", str(free_port()))
    assert code == 1 and error.startswith("EngineError: engine 0 ended before it was ready"), error
    assert "the checkpoint lacks ['model.norm.weight']" in error and "engine-0.log" in error


def test_what_is_wrong_is_said_before_anything_starts(root, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = refusal(root, tmp_path, "--rollout-backend", "embedded", "--port", str(port))
        assert code == 2 and f"port {port} is taken" in error and "where:  --port" in error
    code, error = refusal(root, tmp_path, "--lr", "1e-3", "--prompt-data", "x.jsonl", "--megatron-flag")
    assert code == 2 and "--lr: has no meaning for `instep serve`" in error and "--prompt-data" in error
    code, error = refusal(root, tmp_path, model="nowhere")
    assert code == 2 and "no folder" in error
    assert not list(tmp_path.glob("logs/*"))
