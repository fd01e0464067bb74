"""Real engines on tiny checkpoints that are made here, and how tests ask them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.engines.engine import Engine as ControlledEngine
from instep.engines.kind import Capabilities, kind_of
from instep.engines.spec import Addresses
from instep.engines.vllm_process import vllm_env
from instep.engines.wire import FINAL_ONLY, VLLM_WIRE, GenerationRequest
from instep.system.ports import free_port
from tests import keys
from tests.assets import with_head

MAX_MODEL_LEN = 512
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


def make_checkpoint(path: Path, *, tied: bool, seed: int = 0, max_len: int = MAX_MODEL_LEN) -> Qwen3ForCausalLM:
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
        max_position_embeddings=max_len,
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


def sglang_args(model: Path, *more: str) -> Any:
    """The arguments of a run whose engine is SGLang."""
    words = f"--rollout-backend sglang --device cpu --precision fp32 --seed 0 --sglang-context-length {MAX_MODEL_LEN} "
    words += "--sglang-max-running-requests 64"
    return parse([*words.split(), "--hf-checkpoint", str(model), *more], "plan")


def engine_environment(kind: str = "embedded") -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    common = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    common |= keys.ENVIRONMENT
    if kind == "sglang":
        args = sglang_args(Path())
        at = Addresses("127.0.0.1", 1)
        return common | kind_of(kind).environment(args, plan_engines(args)[0], at, "127.0.0.1", 1)
    return common | (vllm_env(vllm_args(Path()), 1) if kind == "vllm" else {})


def engine_command(kind: str, model: Path, port: int, **flags: Any) -> list[str]:
    if kind in ("vllm", "sglang"):
        args = vllm_args(model) if kind == "vllm" else sglang_args(model)
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
        if self.kind == "sglang" and route == VLLM_WIRE.generate_route:
            pytest.skip("SGLang has another form of requests; tests/engines/test_sglang.py tests it")
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
        """All of them, asked for as the client does; in vLLM's form."""
        if self.kind == "sglang":
            return self._choices_by_wire(token_ids, sampling_params)
        body = {"token_ids": token_ids, "sampling_params": {"output_kind": FINAL_ONLY, **sampling_params}}
        return self.ok("/inference/v1/generate", body)["choices"]

    def _choices_by_wire(self, token_ids: list[int], params: dict[str, Any]) -> list[dict[str, Any]]:
        wire, n = kind_of(self.kind).wire, params.pop("n", 1)

        async def send(payload: dict[str, Any]) -> tuple[Any, None]:
            return self.ok(wire.generate_route, payload), None

        request = GenerationRequest(self.url, "", token_ids, params)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(asyncio.run, wire.complete_n(request, n, send)).result()
        return [
            {
                "index": i,
                "token_ids": one.token_ids,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": p}
                        for token, p in zip(one.token_ids, one.log_probs or [], strict=True)
                    ]
                },
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "weight_versions": [vars(span) for span in one.weight_versions],
            }
            for i, one in enumerate(done)
        ]

    def submit(self, token_ids: list[int], **sampling_params: Any) -> Future[dict[str, Any]]:
        return self.pool.submit(self.generate, token_ids, **sampling_params)

    def at_work(self) -> bool:
        """Whether a request runs (a prefix cache in use is not reset)."""
        return not self.ok("/reset_prefix_cache")["success"]

    def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        wire = kind_of(self.kind).wire
        return wire.prompt_log_probs(self.ok(wire.generate_route, wire.scoring_request(token_ids)), token_ids, self.url)


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
        (process.kill if kind == "embedded" else process.terminate)()  # the others have children of their own
        process.wait(timeout=60)
        engine.pool.shutdown(wait=False)
