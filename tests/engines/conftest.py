"""Real engines on tiny checkpoints that are made here: one process per engine kind and model, for the whole session."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from instep.arguments import parse
from instep.cluster.engine_plan import plan_engines
from instep.engines.capabilities import Capabilities
from instep.engines.engine import Engine as ControlledEngine
from instep.engines.kind import kind_of
from instep.engines.spec import Addresses
from instep.engines.vllm_process import vllm_env
from instep.engines.wire import FINAL_ONLY, VLLM_WIRE
from instep.ports import free_port
from instep.rollout import runtime
from tests import keys
from tests.assets import make_checkpoint as make_tiny_checkpoint
from tests.assets import with_head
from tests.engines import rollouts

ENGINE_KINDS = {"embedded": [], "vllm": [pytest.mark.vllm]}  # and marks of the tests that use it
MAX_MODEL_LEN = 1024
VLLM_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the oracle of log-probs stays on the CPU
TOLERANCE = 1e-5  # of log-probs in float32
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["add the two numbers and show each step", "3 + 4 = 7, carry 1"] * 8, trainer)
    core.post_processor = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 0)])
    special = {"bos_token": "<|pad|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, **special)


def make_checkpoint(path: Path, *, tied: bool, seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 of 2 layers with peaked predictions, saved with its tokenizer; returned in float32."""
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM on a CPU has
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = [1, *range(100, 200)]  # all but the first are ordinary, and end nothing
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    with_head(path, model)
    return model


def vllm_args(model: Path, *more: str) -> Any:
    """The arguments of a run whose engine is vLLM."""
    words = f"--rollout-backend vllm --device {VLLM_DEVICE} --precision fp32 --seed 0 "
    words += f"--vllm-max-model-len {MAX_MODEL_LEN} --vllm-max-num-seqs 64 --vllm-kv-cache-memory-bytes {128 << 20}"
    words += " --vllm-gpu-memory-utilization 0.05" if VLLM_DEVICE == "cuda" else ""
    return parse([*words.split(), "--hf-checkpoint", str(model), *more], "plan")


def engine_environment(kind: str = "embedded") -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    common = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    common |= keys.ENVIRONMENT
    return common | (vllm_env(vllm_args(Path()), 1) if kind == "vllm" else {})


def engine_command(kind: str, model: Path, port: int, **flags: Any) -> list[str]:
    if kind == "vllm":
        args = vllm_args(model)
        return [sys.executable, *kind_of(kind).command(args, plan_engines(args)[0], Addresses("127.0.0.1", port))]
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, **flags}
    extra = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    return [sys.executable, "-m", "instep.engines.embedded", "--model", str(model), "--port", str(port), *extra]


@dataclass
class Engine:
    """A running engine as a client sees it, and the same model in this process (`hf`)."""

    kind: str
    url: str
    path: Path
    hf: Qwen3ForCausalLM
    process: subprocess.Popen[bytes]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(40))

    @property
    def capabilities(self) -> Capabilities:
        return kind_of(self.kind).capabilities

    def control(self) -> ControlledEngine:
        """The same engine as a controller sees it."""
        return ControlledEngine(self.kind, keys.knowing(self.url), None, kind_of(self.kind))

    def call(
        self, route: str, body: Any = None, *, method: str = "POST", timeout: float = 60, headers: Any = None
    ) -> tuple[int, Any]:
        """HTTP status and decoded JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json", **keys.HEADERS, **(headers or {})}
        request = urllib.request.Request(self.url + route, data if method == "POST" else None, headers)
        request.method = method
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read()
                return reply.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ok(self, route: str, body: Any = None, **kwargs: Any) -> Any:
        status, reply = self.call(route, body, **kwargs)
        assert status == 200, (route, status, reply)
        return reply

    def generate(self, token_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
        """The first choice of `/inference/v1/generate`."""
        (choice,) = self.choices(token_ids, **sampling_params)
        return choice

    def choices(self, token_ids: list[int], **sampling_params: Any) -> list[dict[str, Any]]:
        """All of them, asked for as the client does."""
        body = {"token_ids": token_ids, "sampling_params": {"output_kind": FINAL_ONLY, **sampling_params}}
        return self.ok("/inference/v1/generate", body)["choices"]

    def submit(self, token_ids: list[int], **sampling_params: Any) -> Future[dict[str, Any]]:
        return self.pool.submit(self.generate, token_ids, **sampling_params)

    def at_work(self) -> bool:
        """Whether a request runs (a prefix cache in use is not reset)."""
        return not self.ok("/reset_prefix_cache")["success"]

    def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        answer = self.ok("/inference/v1/generate", VLLM_WIRE.scoring_request(token_ids))
        assert answer["prompt_logprobs"][0] is None
        return VLLM_WIRE.prompt_log_probs(answer, token_ids, self.url)


@contextlib.contextmanager
def run_engine(
    kind: str, path: Path, hf: Qwen3ForCausalLM, log: Path, *options: str, module: str = "instep.engines.vllm_main"
) -> Iterator[Engine]:
    port = free_port()
    command = [module if word == "instep.engines.vllm_main" else word for word in engine_command(kind, path, port)]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=output, env=engine_environment(kind))
    engine = Engine(kind, f"http://127.0.0.1:{port}", path, hf, process)
    try:
        deadline = time.monotonic() + 240  # vLLM imports for half a minute, on a busy machine for two
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError):
                if engine.call("/health", method="GET", timeout=2)[0] == 200:
                    break
            time.sleep(0.1)
        yield engine
    finally:
        (process.terminate if kind == "vllm" else process.kill)()  # vLLM has children of its own
        process.wait(timeout=60)
        engine.pool.shutdown(wait=False)


def _params(*fast: tuple[str, str]) -> list[Any]:
    """Every kind with every model; those that are not `fast` are slow."""
    return [
        pytest.param(
            (kind, model), id=f"{kind}-{model}", marks=[*marks, *([] if (kind, model) in fast else [pytest.mark.slow])]
        )
        for kind, marks in ENGINE_KINDS.items()
        for model in ("tied", "untied")
    ]


# A second engine costs as much as the first one, and few tests see how its head is made.
TIED = [(kind, "tied") for kind in ENGINE_KINDS]
PARAMS = _params(*TIED)
# For tests that do: a tied head is no weight of its own.
both_heads = pytest.mark.parametrize("engine", _params(*TIED, ("embedded", "untied")), indirect=True)


@pytest.fixture(scope="session", params=PARAMS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kind, model = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{model}")
    hf = make_checkpoint(folder / "model", tied=model == "tied")
    with run_engine(kind, folder / "model", hf, folder / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def _leave_engine_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves the shared engine paused."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.ok("/abort_requests")
        engine.ok("/resume")


# ---- one embedded engine for tests of rollouts, and arguments about it


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", max_len=1024)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledEngine]:
    engine = rollouts.start_engine(tiny_model, tmp_path_factory.mktemp("engine"))
    yield engine
    runtime.shutdown()
    engine.stop()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + {i} ="}], "label": str(2 * i)}
        for i in range(rollouts.NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_args(tiny_model: Path, data: Path, server: ControlledEngine) -> Callable[..., Any]:
    """Arguments by the real parser, as hooks get them."""

    def make(*extra: str, url: str = server.url, kind: str = "embedded") -> Any:
        argv = ["--hf-checkpoint", str(tiny_model), "--prompt-data", str(data), "--input-key", "prompt"]
        argv += ["--label-key", "label", "--apply-chat-template", "--num-rollout", "3", "--rollout-batch-size", "4"]
        argv += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "12", "--rollout-timeout", "60"]
        argv += ["--actor-num-gpus-per-node", "1"]
        reward = [] if "--rm-type" in extra else ["--custom-rm-path", f"{rollouts.__name__}.parity"]
        reward = [] if "--custom-rm-path" in extra else reward
        port = int(url.rsplit(":", 1)[1])
        return parse([*argv, *reward, *extra]).view(
            {
                "vllm_router_ip": "127.0.0.1",
                "vllm_router_port": port,
                "vllm_model_routers": {"actor": ("127.0.0.1", port)},
                "rollout_engine_urls": [url],
                "rollout_engine_kind": kind,
                "num_rollout": 3,
            }
        )

    return make


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    rollouts.calls.clear()
