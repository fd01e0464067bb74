"""A short measured profile of a machine's GPU or CPU. The seconds of a step are predicted from it.

The measurement takes about twenty seconds. The profile is saved by device in the user's cache folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from instep.errors import ConfigError
from instep.system.atomic import write_text

if TYPE_CHECKING:
    import torch

HERE, MEASURE = "here", "measure"  # values of --card-profile, besides a file
WIDTHS = {"cuda": (1024, 4096), "cpu": (128, 512)}  # of the measured layers
TOKENS = {"cuda": 32768, "cpu": 1024}  # enough that a GPU does not wait for a slow host
SEGMENT = 512  # tokens of each sequence
LAYERS = 2


@dataclass(frozen=True)
class Card:
    """What a device does per second with one rank, in the dtype of the training.

    Attributes:
        matmul: FLOP of large matrix products. memory: bytes that a copy reads and writes.
        to_host, to_device: bytes to and from pinned host memory; on a CPU, bytes of a copy.
        op: seconds to launch one operation from the host.
        forward, train: FLOP of a decoder layer by width, in a forward pass and in a forward and backward pass.
    """

    device: str
    matmul: float
    memory: float
    to_host: float
    to_device: float
    op: float
    forward: dict[int, float]
    train: dict[int, float]

    def rate(self, of: dict[int, float], width: int) -> float:
        """Return FLOP/s of a layer of `width`, interpolated in the logarithm between measured widths."""
        known = sorted(of)
        below = max((w for w in known if w <= width), default=known[0])
        above = min((w for w in known if w >= width), default=known[-1])
        if below >= above:
            return of[above if width < known[0] else below]
        part = math.log(width / below) / math.log(above / below)
        return math.exp((1 - part) * math.log(of[below]) + part * math.log(of[above]))


def layer_flops(hidden: int, ffn: int, queries: int, keys: int, length: int) -> float:
    """Return FLOP per token of a layer's forward pass: products, and causal attention over `length` tokens."""
    return 4.0 * hidden * (queries + keys) + 6.0 * hidden * ffn + 2.0 * length * queries


# ---- profiles in files -----------------------------------------------------------------------------------------------


def cached(name: str) -> Path:
    """Return the file of a device's profile."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "instep" / f"card-{''.join(c if c.isalnum() else '-' for c in name)}.json"


def read(path: Path) -> Card:
    """Read a profile. Raises: ConfigError: the file is not a profile."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("forward", "train"):
            fields[name] = {int(width): float(rate) for width, rate in fields[name].items()}
        return Card(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "give a file that `instep plan --card-profile here` has written, or `measure`"
        what = f"{path} is not a profile of a card: {error}"
        raise ConfigError(what, where="--card-profile", remedy=remedy) from error


def card_of(option: str) -> tuple[Card, Path]:
    """Return the profile of `--card-profile` and its file. For this machine: the saved profile, or measure now."""
    if option not in (HERE, MEASURE):
        return read(Path(option)), Path(option)
    path = cached(device_name())
    if option == HERE and path.exists():
        return read(path), path
    card = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(card), indent=1) + "\n")
    return card, path


def device_name() -> str:
    """Return the name of the GPU, or of the CPU if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure() -> Card:
    """Measure the profile of this machine's first GPU in bf16, or of its CPU in fp32."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    dtype, size = (torch.bfloat16, 8192) if kind == "cuda" else (torch.float32, 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul = 2.0 * size**3 / _seconds(lambda: a @ b, device)
    num = 2**30 if kind == "cuda" else 2**26
    source, target = (torch.zeros(num, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2.0 * num / _seconds(lambda: target.copy_(source), device)
    to_host = to_device = memory / 2
    if kind == "cuda":
        host = torch.zeros(num, dtype=torch.uint8, pin_memory=True)
        to_host = num / _seconds(lambda: host.copy_(source, non_blocking=True), device)
        to_device = num / _seconds(lambda: target.copy_(host, non_blocking=True), device)
    tiny = torch.zeros(16, device=device)
    op = _seconds(lambda: [tiny.add_(1) for _ in range(200)], device) / 200
    forward, train = {}, {}
    for width in WIDTHS[kind]:
        forward[width], train[width] = _layers(width, device, dtype)
    return Card(device_name(), matmul, memory, to_host, to_device, op, forward, train)


def _layers(width: int, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure FLOP/s of hf's layers, in a forward pass and in a forward and backward pass."""
    import torch
    from transformers import Qwen3Config

    from instep.training.hf.layout import run_packed
    from instep.training.hf.model import Policy
    from instep.training.packing import within

    head, tokens = (128 if width >= 1024 else 32), TOKENS[device.type]
    queries, keys, ffn = width, width // 2, 3 * width
    config = Qwen3Config(
        hidden_size=width, intermediate_size=ffn, num_hidden_layers=LAYERS, num_attention_heads=queries // head,
        num_key_value_heads=keys // head, head_dim=head, vocab_size=1024, tie_word_embeddings=True,
    )  # fmt: skip
    policy = Policy(config, dtype, compiles=device.type == "cuda")
    policy.model.init_weights()
    policy.to(device)
    lengths = torch.full((tokens // SEGMENT,), SEGMENT)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    ids, positions = torch.randint(0, 1024, (tokens,)).to(device), within(lengths).to(device)

    def run() -> torch.Tensor:
        states: torch.Tensor = run_packed(policy.model, ids, positions, bounds, SEGMENT, None)
        return states

    def step() -> None:
        run().sum().backward()

    with torch.no_grad():
        forward = _seconds(run, device)
    train = _seconds(step, device)
    flops = LAYERS * tokens * layer_flops(width, ffn, queries, keys, SEGMENT)
    return flops / forward, 3 * flops / train


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the median time of `repeats` runs, after two warm-up runs."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    run()
    wait()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - began)
    return median(found)
