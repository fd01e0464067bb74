"""The way `lora` on a GPU: vLLM with CUDA graphs takes one adapter after another, and follows the trainer."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.engines.wire import GENERATE
from instep.errors import EngineError
from instep.rollout import runtime
from instep.rollout.client import Completion, complete
from instep.system.scratch import Scratch, memory_root
from instep.training import lr_schedule
from instep.types import TokenBatch
from instep_engine.place import SYNC
from tests.assets import make_prompts, make_tokenizer
from tests.e2e.commands import grpo_arguments
from tests.e2e.test_planted import errors_in
from tests.e2e.test_sync_proof import train_once

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RANK, LAYERS = 16, 36  # as many tensors as an adapter of a 4B model has: 504
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
FLAGS = "--vllm-gpu-memory-utilization 0.1 --vllm-kv-cache-memory-bytes 1073741824 --vllm-max-num-seqs 8"
TOGETHER = "--colocate --no-offload-train --no-offload-rollout"  # on one GPU, both awake
NOISE = 0.1  # of bf16 in log-probs of this model


@dataclass
class Stack:
    args: Args
    actor: RoleTrainer
    engine: Engine
    folder: Path

    def decoded(self) -> tuple[list[int], list[float]]:
        """A prompt with its response, and the log-probs that the engine gave when it made the response."""
        prompt = list(range(5, 21))
        sampling = {"max_tokens": 24, "temperature": 1.0, "seed": 1, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": {**sampling, "detokenize": False}}
        (choice,) = self.engine.post("/inference/v1/generate", body, timeout=60)["choices"]
        return prompt + choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    def trained(self, tokens: list[int], num: int) -> list[float]:
        """The trainer's log-probs of the last `num` of `tokens`."""
        lengths = torch.tensor([len(tokens)])
        columns = {"temperature": torch.ones(1)}
        batch = TokenBatch(torch.tensor(tokens), lengths, lengths - 1, sample_columns=columns)
        return self.actor.probe_log_probs(batch, 60.0)[0][-num:]

    def rolled_out(self, arrays: bool) -> Completion:
        """A response as a rollout asks for it, in arrays or in JSON."""
        params = {"max_tokens": 24, "temperature": 1.0, "seed": 1, "ignore_eos": True}
        url = self.engine.url + GENERATE
        return runtime.run(complete(url, "", list(range(5, 21)), params, arrays=arrays), timeout=60)


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "head_dim": 64}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
    size["vocab_size"] = 1024  # vLLM 0.26 warms up an adapter of a tied embedding with as many rows as columns
    config = Qwen3Config(tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, **size, **heads)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "hf")
    make_prompts(folder / "train.jsonl", 8)
    words = [
        "--lora-rank",
        str(RANK),
        "--weight-sync",
        "lora",
        "--rollout-backend",
        "vllm",
        *f"{FLAGS} {TOGETHER}".split(),
    ]
    words += ["--vllm-compilation-config", json.dumps(GRAPHS), "--device", "cuda", "--precision", "bf16"]
    args = parse(grpo_arguments(folder, folder / "run", *words)[1:], "train")
    workers = WorkerGroup("actor", 1, folder / "logs", {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo"})
    engine = start_engine(args, plan_engines(args)[0], num_threads=4, log_dir=folder / "logs")
    try:
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), 1, timeout=120)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(folder / "hf")
        try:
            engine.wait_ready(300)
        except EngineError:
            print(errors_in(folder / "logs" / "engine-0.log"))
            raise
        yield Stack(args, actor, engine, folder)
    finally:
        workers.close()
        engine.stop()


@pytest.fixture
def sync(stack: Stack) -> Iterator[WeightSync]:
    scratch = Scratch(f"{SYNC}gpu-", memory_root())
    made = WeightSync(stack.args, stack.actor, "lora_ipc", scratch.path, vocab_size=50, max_len=128)
    yield made
    made.close()
    scratch.remove()


def test_an_engine_answers_before_the_first_adapter(stack: Stack) -> None:
    """With the base; and its graphs are captured."""
    tokens, log_probs = stack.decoded()
    ours = stack.trained(tokens, len(log_probs))  # B is 0
    assert max(abs(a - b) for a, b in zip(log_probs, ours, strict=True)) <= NOISE
    log = (stack.folder / "logs" / "engine-0.log").read_text()
    assert "Graph capturing finished" in log
    assert f"base and adapter in one product in {4 * LAYERS} of {4 * LAYERS} layers" in log


def test_log_probs_follow_the_trainer_over_swaps(stack: Stack, sync: WeightSync, monkeypatch: Any) -> None:
    """The response is decoded through CUDA graphs, whose buffers each swap writes."""
    post, seconds = Engine.post, dict[str, float]()

    def timed(self: Engine, path: str, body: Any = None, **options: Any) -> Any:
        began = time.monotonic()
        answer = post(self, path, body, **options)
        seconds[path] = seconds.get(path, 0.0) + time.monotonic() - began
        return answer

    monkeypatch.setattr(Engine, "post", timed)
    swaps, pauses, before = [], [], None
    for number in range(10):
        train_once(stack.actor.workers, 1e-3)
        seconds.clear()
        result = sync.run([stack.engine])
        swaps.append(seconds["/update_weights"])
        pauses.append(result.seconds_of["paused"])
        tokens, log_probs = stack.decoded()
        ours = stack.trained(tokens, len(log_probs))
        gap = max(abs(a - b) for a, b in zip(log_probs, ours, strict=True))
        trips = {path.rpartition("/")[2]: round(1e3 * s, 1) for path, s in seconds.items()}
        trips |= {name: round(1e3 * result.seconds_of[name], 1) for name in ("load", "paused")}
        print(f"swap {number}: probe {result.proven.last.largest:.3g}, decoded {gap:.3g}, ms {trips}")
        assert gap <= max(NOISE, 3 * result.proven.last.largest) and log_probs != before
        assert result.num_tensors == 2 * 7 * LAYERS
        before = log_probs
    num_bytes = result.num_bytes / 1e6
    swap, pause = (1e3 * statistics.median(found[4:]) for found in (swaps, pauses))  # the first four warm up
    print(f"an adapter of {num_bytes:.1f} MB in {result.num_tensors} tensors: {swap:.1f} ms, the pause {pause:.1f} ms")
    assert swap <= 50 and pause <= 50


def test_arrays_are_of_the_adapter_as_json_is(stack: Stack, sync: WeightSync) -> None:
    """The fast ways take adapters: their log-probs are the trainer's, and those of vLLM's own route."""
    train_once(stack.actor.workers, 1e-3)
    sync.run([stack.engine])
    runtime.state().take_array_share()
    fast, share = stack.rolled_out(True), runtime.state().take_array_share()
    stock = stack.rolled_out(False)
    prompt, found = list(range(5, 21)), list(fast.log_probs or [])
    ours = stack.trained(prompt + list(fast.token_ids), len(found))
    assert share == {"perf/answers_in_arrays": 1.0}
    assert list(fast.token_ids) == list(stock.token_ids)
    assert max(abs(a - b) for a, b in zip(found, stock.log_probs or [], strict=True)) <= 1e-3
    assert max(abs(a - b) for a, b in zip(found, ours, strict=True)) <= NOISE
    log = (stack.folder / "logs" / "engine-0.log").read_text()
    assert "short loops for steps that decode only" in log and "written where vLLM keeps this one" in log


def test_what_is_not_finite_is_named(stack: Stack, sync: WeightSync, monkeypatch: Any) -> None:
    """On the device all tensors are checked at once, and the one is still named."""
    from instep.errors import SyncError
    from tests.e2e.test_lora_sync import with_bytes
    from tests.e2e.test_sync_proof import tamper

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 0] = float("nan")
        return tensor

    with monkeypatch.context() as patch:
        tamper(patch, lambda manifest: with_bytes(manifest, spoil))
        with pytest.raises(SyncError, match=r"layers\.0\.self_attn\.q_proj\.lora_B\.weight is not finite"):
            sync.run([stack.engine], "lora")  # whose buckets are files
    assert sync.run([stack.engine]).num_tensors == 2 * 7 * LAYERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize("slices", [[64], [192, 192], [512, 128, 64]])
@pytest.mark.parametrize("num_tokens", [1, 16, 33, 64, 129, 1000])
def test_the_kernel_adds_what_torch_would(dtype: torch.dtype, rank: int, slices: list[int], num_tokens: int) -> None:
    from instep_engine.vllm.fast.adapter import add_adapter

    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    width = sum(slices)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    y, b, bias = drawn(num_tokens, width + len(slices) * rank), drawn(width, rank), drawn(width)
    tokens = torch.randint(-1, 1, (num_tokens + 7,), generator=generator, device="cuda")
    y[:, width:] = torch.where((tokens[:num_tokens] >= 0)[:, None], y[:, width:], torch.nan)  # of others none is read
    for given in (None, bias):
        got = add_adapter(y, b, given, tokens, slices, rank)
        on_cpu = [None if t is None else t.cpu().double() for t in (y, b, given)]
        want = add_adapter(*on_cpu, tokens.cpu(), slices, rank)  # type: ignore[arg-type]
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)


def test_joined_layers_give_vllms_log_probs_and_cost_little(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three compiled engines of 0.6B dimensions: without adapters, with vLLM's own kernels, and with one product."""
    from benchmarks.lora_engine import main

    code = main(["--size", "0.6b", "--device", "cuda", "--models", str(tmp_path), "--out", str(tmp_path / "out.json")])
    print(capfd.readouterr().out)
    found = json.loads((tmp_path / "out.json").read_text())
    assert code == 0 and found["log_probs"].keys() == {"none", "one", "mixed", "other", "again"}
    assert found["headline"]["joined_of_base"] > found["headline"]["stock_of_base"]
