"""How long a parked trainer takes to come back: the calls, and the copies that go on beside what is computed next.

    python benchmarks/parking.py [--size 0.6b] [--repeats 5]

Float32 weights and two moments of a model leave a GPU for pinned host memory and come back (`weights/parking.py`), each
time after the allocator has given all that it keeps back to the GPU. `one block` first asks the allocator for one block
as large as all of them, which it then divides among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from random_model import dimensions  # noqa: E402

from instep.weights.parking import Parking, give_back  # noqa: E402


def shapes(size: str) -> list[torch.Size]:
    """Those of the weights of a Qwen3 of these dimensions."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**dimensions(size)))
    return [parameter.shape for parameter in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b", help="dimensions of random_model.py")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [torch.zeros(shape, device=device) for shape in shapes(given.size) for _ in range(3)]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    park = Parking(device, lambda: tensors)
    for one_block in (False, True):
        seconds: dict[str, list[float]] = {"leave": [], "bring": [], "there": []}
        for _ in range(given.repeats):
            began = time.perf_counter()
            park.leave()
            park.free()
            give_back(device)
            left = time.perf_counter()
            if one_block:
                torch.empty(num_bytes, dtype=torch.uint8, device=device)
            park.bring()
            brought = time.perf_counter()
            park.ready()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds["leave"].append(left - began)
            seconds["bring"].append(brought - left)
            seconds["there"].append(time.perf_counter() - left)
        row = {name: round(median(each), 4) for name, each in seconds.items()}
        print(json.dumps({"one block": one_block, "gb": num_bytes / 1e9, "tensors": len(tensors), **row}), flush=True)


if __name__ == "__main__":
    main()
