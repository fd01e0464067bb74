"""Fast log-probs on a GPU, where vLLM 0.26 has all parts of them: the kernel, equality with vLLM's route, and speed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config

from instep.engines.wire import GENERATE
from instep.rollout import runtime
from instep.rollout.client import complete
from tests import keys
from tests.engines import test_fast_log_probs as answers
from tests.engines.running import Engine, make_checkpoint, run_engine, train_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCAB_SIZE = 151_936
WANTED = 30_000  # tokens per second of 256 requests, where nothing else runs on the card
NO_COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # starts in seconds, and has the graphs that matter
SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 7), (3, 4096), (5, 4097), (257, 151_936)])
def test_the_kernel_is_a_log_softmax(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    from instep_engine.vllm.fast.kernels import token_log_probs

    generator = torch.Generator(device="cuda").manual_seed(num_rows)
    wide = torch.randn(num_rows, vocab_size + 64, device="cuda", generator=generator, dtype=torch.float32) * 4
    logits = wide.to(dtype)[:, :vocab_size]  # rows that are not contiguous with each other
    logits[0, : vocab_size // 2] = float("-inf")  # whole parts, as top-k and top-p leave them
    logits[-1, 1:] = float("-inf")
    tokens = torch.randint(vocab_size, (num_rows,), device="cuda", generator=generator)
    tokens[0] = 0 if num_rows == 1 else vocab_size - 1
    tokens[-1] = 0
    if num_rows == 1:
        logits[0, 0] = 1.5
    want = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    got = token_log_probs(logits, tokens)
    assert got.dtype == torch.float32 and (got.double() - want).abs().max() < 1e-5
    tokens[-1] = vocab_size - 1
    assert token_log_probs(logits, tokens)[-1] == float("-inf")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Engine, Path]]]:
    """Two engines, which start at the same time: a tiny one in float32, and one of 0.6B dimensions with any weights."""
    folder = tmp_path_factory.mktemp("fast")
    hf = make_checkpoint(folder / "tiny", tied=True)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder / "large")
    train_tokenizer().save_pretrained(folder / "large")
    graphs = json.dumps({**NO_COMPILATION, "cudagraph_capture_sizes": SIZES})
    large = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-num-seqs", "256", "--max-model-len", "2048"]
    large += ["--gpu-memory-utilization", "0.35", "--kv-cache-memory-bytes", "20000000000", "-cc", graphs]
    tiny = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        options = {"tiny": tiny, "large": large}
        logs = {name: folder / f"{name}.log" for name in options}
        entered = {
            name: pool.submit(stack.enter_context, run_engine("vllm", folder / name, hf, logs[name], *more))
            for name, more in options.items()
        }
        yield {name: (engine.result(), logs[name]) for name, engine in entered.items()}
        runtime.shutdown()


@pytest.fixture
def engine(engines: dict[str, tuple[Engine, Path]]) -> Engine:
    return engines["tiny"][0]


def test_all_parts_are_on(engine: Engine, engines: dict[str, tuple[Engine, Path]]) -> None:
    said = {}
    for name, (_, log) in engines.items():
        lines = [line for line in log.read_text().splitlines() if "instep: " in line]
        said[name] = {line.partition("instep: ")[2] for line in lines}
        print(name, *sorted(said[name]), sep="\n    ")
    assert "short loops for steps that decode only" in said["large"]
    assert "own kernels to sample tokens and for their log-probs (model runner V2)" in said["large"]


def test_throughput(engine: Engine, engines: dict[str, tuple[Engine, Path]]) -> None:
    """Prints tokens per second, also of lengths that differ; other tests on the card slow both routes down.

    It takes `engine`, too, so that pytest-xdist runs all tests of these engines in one process.
    """
    url = keys.knowing(engines["large"][0].url) + GENERATE
    numbers = random.Random(time.time_ns())  # no prompt is in the cache
    equal = [(128, 512)] * 256
    mixed = [(numbers.randint(64, 256), numbers.randint(32, 512)) for _ in range(512)]

    def measure(sizes: list[tuple[int, int]], arrays: bool) -> float:
        params: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}

        async def one(num_prompt: int, num_response: int) -> int:
            prompt = [numbers.randrange(3, 250) for _ in range(num_prompt)]
            out = await complete(url, "", prompt, {**params, "max_tokens": num_response}, arrays=arrays)
            assert out.log_probs is not None and len(out.token_ids) == len(out.log_probs) == num_response
            return num_response

        async def everything() -> int:
            return sum(await asyncio.gather(*(one(*size) for size in sizes)))

        began = time.monotonic()
        num_tokens = runtime.run(everything(), timeout=120)
        return num_tokens / (time.monotonic() - began)

    for arrays in (True, False):
        measure([(128, 40)] * 256, arrays)  # kernels are compiled at their first use
    fast, stock = measure(equal, True), measure(equal, False)
    print(f"256 x (128 + 512): {fast:,.0f} tokens/s in arrays, {stock:,.0f} by vLLM's own route ({fast / stock:.2f}x)")
    print(f"512 x (64..256 + 32..512): {measure(mixed, True):,.0f} tokens/s in arrays")
    print(f"wanted on an idle card: {WANTED:,}; {'reached' if fast >= WANTED else 'NOT reached'}")
    assert fast > 1.5 * stock


def test_windows_decode_in_short_loops(tmp_path: Path) -> None:
    """Six groups of layers share their blocks, five of which forget those before the window."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    config = Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, layer_types=kinds, sliding_window=40, max_position_embeddings=512,
        eos_token_id=1, pad_token_id=0, bos_token_id=2, query_pre_attn_scalar=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    train_tokenizer().save_pretrained(tmp_path / "model")
    more = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 28), "--max-model-len", "512"]
    numbers, log = random.Random(0), tmp_path / "log"
    with run_engine("vllm", tmp_path / "model", model, log, *more, "--enforce-eager") as engine:
        url = keys.knowing(engine.url) + GENERATE

        async def one(num_prompt: int, num_response: int) -> tuple[list[int], Any]:
            prompt = [numbers.randrange(3, 250) for _ in range(num_prompt)]
            params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": num_response, "seed": num_prompt}
            return prompt, await complete(url, "", prompt, params)

        async def everything() -> list[tuple[list[int], Any]]:
            return await asyncio.gather(*(one(20 + i, 300 - 3 * i) for i in range(64)))

        answers = runtime.run(everything(), timeout=120)
    runtime.shutdown()
    assert "short loops for steps that decode only" in log.read_text()
    for prompt, answer in answers[::7]:
        tokens = torch.tensor([prompt + answer.token_ids])
        with torch.no_grad():
            want = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = want.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        assert (torch.tensor(answer.log_probs) - want).abs().max() < 2e-3


# The same tests as on a CPU, here with `engine` of this file.
test_a_batch_may_mix_both = answers.test_a_batch_may_mix_both
test_a_client_that_leaves_is_forgotten = answers.test_a_client_that_leaves_is_forgotten
test_an_abort_returns_a_beginning = answers.test_an_abort_returns_a_beginning
test_arrays_say_what_json_says = answers.test_arrays_say_what_json_says
test_refusals_are_those_of_vllm = answers.test_refusals_are_those_of_vllm
test_the_client_takes_arrays = answers.test_the_client_takes_arrays
test_what_asks_for_more_gets_json = answers.test_what_asks_for_more_gets_json
