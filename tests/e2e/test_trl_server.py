"""`instep vllm-serve`: TRL's routes of both generations as plain HTTP, and weights from a trainer that is not ours."""

import base64
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.system.ports import free_port
from tests.assets import make_checkpoint
from tests.bounds import allowed, until
from tests.e2e import trl_sender
from tests.e2e.commands import ENVIRONMENT, gone_within
from tests.e2e.trl_sender import Http, Refusal, Sender, weights_of

SEQUENCES = [[5, 6, 7, 8, 9], [10, 11, 12], [1, 42, 40, 26, 39, 52]]
BOTH = pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "new"])


class Server:
    """A running `instep vllm-serve`, or (`serve`) `instep serve`, whose `url` has the key that opens weights."""

    def __init__(self, root, *more, serve=False):
        self.root, self.port, self.run_dir = root, free_port(), root / f"run-{free_port()}"
        self.url, self.output = f"http://127.0.0.1:{self.port}", root / f"{self.run_dir.name}.out"
        words = ["serve", "--hf-checkpoint"] if serve else ["vllm-serve", "--model"]
        command = [sys.executable, "-m", "instep.cli", *words, str(root / "m0")]
        command += ["--port", str(self.port), "--run-dir", str(self.run_dir), "--device", "cpu", "--num-threads", "1"]
        with open(self.output, "w") as out:
            self.process = subprocess.Popen([*command, *more], env=ENVIRONMENT, stdout=out, stderr=out)

    def wait_for(self, text, seconds=120.0):
        deadline = time.monotonic() + seconds
        while text not in (said := self.output.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        return self

    def scores(self):
        """The log-probs of SEQUENCES, from their second token on."""
        body = {"sequences": SEQUENCES, "prompt_lengths": [1] * 3, "top_logprobs": 1, "response_format": "binary"}
        answer = Http(self.url)("/get_sequence_logprobs/", body)
        actual = np.frombuffer(base64.b64decode(answer["actual_logprobs_b64"]), np.float32).reshape(3, -1)
        return [row[:n].tolist() for row, n in zip(actual, answer["completion_lengths"], strict=True)]

    def version(self):
        return int(Http(self.url)("/weight_info", method="GET")["weight_version"])

    def sender(self, legacy):
        sender = Sender(self.url, free_port(), legacy)
        sender.join()
        return sender

    def __enter__(self):
        self.wait_for("Ctrl-C ends it")
        if (key := self.run_dir / "control_key").exists():
            self.url = f"http://user:{key.read_text().strip()}@127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(240)
        assert gone_within(family, 5)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trl")
    for i in range(3):
        make_checkpoint(root / f"m{i}", seed=i, head_dim=32)
    return root


@pytest.fixture(scope="module")
def server(root):
    with Server(root, "--rollout-backend", "embedded") as server:
        yield server


@torch.no_grad()
def expected(root, name):
    """The scores of a checkpoint by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
    out = []
    for tokens in SEQUENCES:
        ids = torch.tensor([tokens])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        out.append(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return out


def agree(scores, others):
    return all(np.allclose(a, b, atol=2e-5) for a, b in zip(scores, others, strict=True))


def refusal(call, *given):
    with pytest.raises(Refusal) as raised:
        call(*given)
    return raised.value


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_generate_answers_prompt_by_prompt(server):
    body = {"prompts": SEQUENCES, "n": 2, "max_tokens": 4, "logprobs": 2, "generation_kwargs": {"seed": 5}}
    answer = Http(server.url)("/generate/", body)
    assert answer["prompt_ids"] == SEQUENCES and len(answer["completion_ids"]) == 6
    columns = (answer[k] for k in ("completion_ids", "logprobs", "logprob_token_ids"))
    for ids, scores, tokens in zip(*columns, strict=True):
        for own, ranked, which in zip(ids, scores, tokens, strict=True):
            assert own in which and 2 <= len(which) <= 3 and ranked == sorted(ranked, reverse=True)
    body = {"prompts": ["12+", "7"], "max_tokens": 2, "logprobs": None, "truncate_prompt_tokens": 2}
    texts = Http(server.url)("/generate/", body)
    assert texts["logprobs"] is None and [len(p) for p in texts["prompt_ids"]] == [2, 1]


def test_both_generations_give_the_same_tokens(server):
    """Of one engine with one seed; the newer one in the form of OpenAI's routes."""
    http, sampling = Http(server.url), {"n": 2, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 11}
    old = http("/generate/", {"prompts": SEQUENCES, "generation_kwargs": sampling})
    asks = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0, **sampling}
    new = http("/v1/completions", {"prompt": SEQUENCES, **asks})["choices"]
    assert [c["token_ids"] for c in new] == old["completion_ids"] and [c["index"] for c in new] == list(range(6))
    assert [c["prompt_token_ids"] for c in new[::2]] == SEQUENCES
    scores = [c["logprobs"]["token_logprobs"] for c in new]
    assert agree(scores, old["logprobs"])
    assert new[0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in new[0]["token_ids"]]
    talk = [{"role": "user", "content": "12+30=?"}]
    chat = http("/chat/", {"messages": [talk], "max_tokens": 4, "generation_kwargs": {"seed": 2}})
    body = {"messages": talk, "max_tokens": 4, "seed": 2, "logprobs": True, "return_token_ids": True}
    said = http("/v1/chat/completions", body)
    assert said["prompt_token_ids"] == chat["prompt_ids"][0]
    assert said["choices"][0]["token_ids"] == chat["completion_ids"][0]
    plain = http("/v1/chat/completions", {"messages": talk, "max_tokens": 4})  # OpenAI's, which an engine answers
    assert plain["choices"][0]["message"]["content"] is not None


def test_sequences_are_scored_as_transformers_does(server, root):
    assert agree(server.scores(), expected(root, "m0"))
    body = {"sequences": SEQUENCES, "prompt_lengths": [2, 1, 6], "top_logprobs": 3}
    answer = Http(server.url)("/get_sequence_logprobs/", body)
    assert [len(row) for row in answer["logprobs"]] == [3, 2, 0]
    assert all(len(place) in (3, 4) for row in answer["logprob_token_ids"] for place in row)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate/", {"prompts": "12"}, "prompts must be"),
        ("/generate/", {"prompts": ["1"], "images": [["aa"]]}, "images are not supported"),
        ("/generate/", {"prompts": ["1"], "n": 0}, "n must be"),
        ("/chat/", {"messages": [[]], "images": None}, "images: unknown fields"),
        ("/generate/", {"prompts": ["1"], "min_p": 0.1}, "min_p=0.1 is not supported"),
        ("/generate/", {"prompts": [[10**6]]}, "outside the vocabulary"),
        ("/chat/", {"messages": [[]]}, "must be a conversation"),
        ("/get_sequence_logprobs/", {"sequences": [[1]], "prompt_lengths": [2]}, "the sequence has 1 tokens"),
        ("/v1/chat/completions", {"messages": [], "return_token_ids": True, "chat_template": "x"}, "chat_template"),
        ("/update_named_param/", {"name": "x", "dtype": "float32", "shape": [1]}, "you have no weight group"),
        ("/update_weights", {"update_info": {}}, "you have no weight group"),
        ("/init_communicator/", {"port": 1, "world_size": 5}, "it must be 2"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, "adapters by name are not served"),
        ("/nothing", {}, "no route POST /nothing"),
    ],
)
def test_wrong_requests_are_refused_at_once(server, path, body, says):
    began = time.monotonic()
    found = refusal(Http(server.url), path, body)
    assert found.status in (400, 404, 409) and says in str(found) and time.monotonic() - began < allowed(10)


def test_a_request_of_a_foreign_name_is_refused(server):
    assert refusal(lambda: Http(server.url)("/generate/", {}, Host="evil.example")).status == 403


# ---- weights ---------------------------------------------------------------------------------------------------------


@BOTH
def test_weights_reach_the_engine(server, root, legacy):
    sender, before = server.sender(legacy), server.version()
    for i, name in enumerate(("m1", "m2", "m0"), 1):
        tensors = weights_of(root / name)
        if name == "m2":  # as a trainer in bfloat16 has them; and a tied weight comes, too
            tensors = {n: t.bfloat16() for n, t in tensors.items()}
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        sender.send(tensors)
        sender.end()
        assert server.version() == before + i
        assert agree(server.scores(), expected(root, name)) == (name != "m2")
    sender.close()


@BOTH
def test_a_partial_update_is_refused_and_the_next_one_works(server, root, legacy):
    sender, before, version = server.sender(legacy), server.scores(), server.version()
    tensors = weights_of(root / "m1")
    part = {n: t for n, t in tensors.items() if n != "model.norm.weight"}

    def send():
        sender.send(part)
        sender.end()

    found = refusal(send)
    assert found.status == 409 and "model.norm.weight" in str(found), found
    assert server.scores() == before and server.version() == version
    sender.send(tensors)
    sender.end()
    assert agree(server.scores(), expected(root, "m1"))
    sender.close()


@pytest.mark.parametrize(("legacy", "fault"), [(True, "name"), (False, "nan")])
def test_wrong_tensors_are_refused(server, root, legacy, fault):
    sender, before = server.sender(legacy), server.scores()
    tensors = weights_of(root / "m2")
    norm = tensors.pop("model.norm.weight")
    wrong = {"name": ("model.norm.weights", norm), "nan": ("model.norm.weight", norm * torch.nan)}
    name, tensor = wrong[fault]

    def send():
        sender.send(tensors | {name: tensor})
        sender.end()

    found = refusal(send)
    assert found.status == 409 and name in str(found), found
    assert server.scores() == before
    sender.close()


@BOTH
def test_a_second_trainer_waits_for_the_first_to_leave(server, root, legacy):
    first, second = server.sender(legacy), Sender(server.url, free_port(), legacy)
    found = refusal(second.join, 10.0)
    assert found.status == 409 and "has the weight group since" in str(found)
    first.send(weights_of(root / "m2"))
    assert first.http("/server_info", method="GET")["vllm_config"]["weight_transfer_config"]
    first.close()
    second.join()
    second.send(weights_of(root / "m0"))
    second.end()
    assert agree(server.scores(), expected(root, "m0"))
    second.close()


def test_a_second_trainer_hears_it_before_it_joins_the_group(server):
    """TRL >= 1.14 asks /server_info first, 1.11 to 1.13 /get_world_size; then they would wait for NCCL for ever."""
    http, ask = Http(server.url), ("/server_info", "/get_world_size")
    assert [http.status(path, method="GET") for path in ask] == [200, 200]
    first = server.sender(legacy=False)
    for path in ask:
        found = refusal(lambda path=path: http(path, method="GET"))
        assert found.status == 409 and "has the weight group since" in str(found)
        assert "has the weight group since" in found.reason  # all that `raise_for_status` shows
    assert http("/get_world_size/", method="GET") == {"world_size": 1}  # TRL <= 1.10 hears it when it inits
    first.close()
    assert [http.status(path, method="GET") for path in ask] == [200, 200]


def test_a_trainer_without_an_open_connection_keeps_the_group_by_its_store(server):
    """As TRL's asynchronous trainer, which opens a connection for each request."""
    first, second = server.sender(legacy=False), Sender(server.url, free_port(), False)
    first.http.close()
    assert "has the weight group since" in str(refusal(second.join, 10.0))
    first.close()
    second.join()
    second.close()


@BOTH
def test_a_trainer_that_dies_in_an_update_leaves_the_engine_as_it_is(server, root, legacy):
    before, version = server.scores(), server.version()
    words = [server.url, str(free_port()), "legacy" if legacy else "new", str(root / "m1")]
    command = [sys.executable, "-m", trl_sender.__name__, *words]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout.readline() == "half is sent\n"
        dying.kill()
    began = time.monotonic()
    assert server.scores() == before and server.version() == version
    sender = server.sender(legacy)  # the group is free again
    sender.send(weights_of(root / "m2"))
    sender.end()
    assert agree(server.scores(), expected(root, "m2")) and time.monotonic() - began < allowed(30)
    sender.close()


def test_an_engine_that_dies_comes_back_with_the_weights_that_were_sent(server, root):
    sender = server.sender(legacy=False)
    sender.send(weights_of(root / "m1"))
    ours = psutil.Process(server.process.pid).children(recursive=True)
    engine, _http = (p for p in ours if "embedded" in " ".join(p.cmdline()))
    engine.kill()
    assert agree(server.scores(), expected(root, "m1"))  # it waits for the engine
    server.wait_for("serves again")
    sender.close()


def test_a_pause_lets_requests_wait(server):
    http = Http(server.url)
    assert http("/pause?mode=keep")["status"] == "paused"
    assert http("/is_paused", method="GET")["is_paused"]
    asked = trl_sender.ThreadPoolExecutor(1).submit(Http(server.url), "/generate/", {"prompts": [[5, 6]]})
    time.sleep(1.0)
    assert not asked.done()
    http("/resume")
    assert asked.result(30)["completion_ids"] and not http("/is_paused", method="GET")["is_paused"]


def test_engines_stay_paused_from_pause_to_resume(server, root):
    """As TRL's asynchronous trainers do it: each request by a connection of its own, weights under /pause?mode=keep."""
    sender, once = server.sender(legacy=False), lambda *what: Http(server.url)(*what)
    sender.http.close()
    for i, name in enumerate(("m1", "m2")):
        once("/pause?mode=keep")
        asked = trl_sender.ThreadPoolExecutor(1).submit(once, "/generate/", {"prompts": [[5, 6]]})
        version, tensors = server.version(), weights_of(root / name)
        for _ in range(1 + i):  # twice in one pause, and of two only the last one is used
            once("/start_weight_update", {"is_checkpoint_format": True})
            sender.stream(tensors)
            once("/finish_weight_update")
        assert server.version() == version + 1 + i
        time.sleep(1.0)
        assert not asked.done() and once("/is_paused", None, "GET")["is_paused"]
        once("/resume")
        assert asked.result(30)["completion_ids"] and not once("/is_paused", None, "GET")["is_paused"]
        assert agree(server.scores(), expected(root, name))
    sender.close()


def test_a_pause_ends_with_the_trainer_that_has_died(server, root):
    words = [server.url, str(free_port()), "pause", str(root / "m1")]
    command = [sys.executable, "-m", trl_sender.__name__, *words]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout.readline() == "paused\n"
        time.sleep(1.0)
        assert Http(server.url)("/is_paused", method="GET")["is_paused"]  # while it lives
        dying.kill()
    assert Http(server.url)("/generate/", {"prompts": [[5, 6]]})["completion_ids"]
    until(lambda: "which has paused the engines, has lost the weight group" in server.output.read_text())


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers_and_takes_weights_likewise(root):
    words = ["--rollout-backend", "vllm", "--vllm-kv-cache-memory-bytes", str(128 << 20), "--enforce_eager"]
    with Server(root, *words, "--max_model_len", "64") as server:
        http = Http(server.url)
        body = {"prompts": SEQUENCES, "n": 2, "max_tokens": 4, "logprobs": 2, "generation_kwargs": {"seed": 5}}
        answer = http("/generate/", body)
        assert len(answer["completion_ids"]) == 6
        for ids, rows in zip(answer["completion_ids"], answer["logprob_token_ids"], strict=True):
            assert all(own in which and 2 <= len(which) <= 3 for own, which in zip(ids, rows, strict=True))
        asks = {"prompt": SEQUENCES, "n": 2, "max_tokens": 4, "seed": 5, "logprobs": 0, "return_token_ids": True}
        choices = http("/v1/completions", asks)["choices"]
        assert [c["token_ids"] for c in choices] == answer["completion_ids"]
        assert agree(server.scores(), expected(root, "m0"))
        for legacy, name in ((True, "m1"), (False, "m2"), (False, "m0")):
            sender = server.sender(legacy)
            if name == "m0":  # as asynchronous trainers have it
                http("/pause?mode=keep")
            sender.send(weights_of(root / name))
            if name == "m0":
                http("/resume")
            sender.end()
            assert agree(server.scores(), expected(root, name))
            sender.close()
