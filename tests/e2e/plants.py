"""What goes wrong with weights on the sender's side, planted in a worker's own process.

A worker that is started with `environment(folder)` reads the file `plant` of the folder in each session, and changes
what it sends as the function of that name says. The digests are then those of what is sent: only the probe, the
engine's own checks and the comparison with the trainer's weights can tell. `WRITES` change what single copy writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VARIABLE = "INSTEP_TEST_PLANT"
ROOT = Path(__file__).parents[2]
Item = tuple[Any, torch.Tensor]  # TensorSpec and tensor
Items = list[Item]
FIRST = "model.layers.0.self_attn"


def environment(folder: Path) -> dict[str, str]:
    """The environment of workers in which `plant` files of `folder` take effect."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'instep.cluster.worker_main' in sys.orig_argv:\n"
        "    from tests.e2e.plants import in_worker\n    in_worker()\n"
    )
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: str(folder / "plant")}


def planted() -> str:
    path = Path(os.environ[VARIABLE])
    return path.read_text() if path.exists() else ""


def in_worker() -> None:
    """Let the worker of this process send what the present plant makes of its weights."""
    from instep.training.hf.mirror import Mirror
    from instep.training.worker import Worker
    from instep.weights import ipc, nccl
    from instep_engine.manifest import TensorRecord

    publish, source, refresh = Worker.publish, Worker._source, Mirror.refresh
    send_header, send_bucket, tell = nccl.send_header, nccl.send_bucket, ipc._Stream._tell
    sending = []

    def publish_planted(self: Worker, way: str, order: Any) -> None:
        sending.append(way)
        try:
            publish(self, way, order)
        finally:
            sending.clear()

    def source_planted(self: Worker, way: str) -> Any:
        inner = source(self, way)
        return Planted(inner, planted()) if sending and way != "single-copy" else inner

    def header_planted(group: Any, session: Any, buckets: Any) -> Any:
        return send_header(group, *in_header(planted(), dict(session), [list(bucket) for bucket in buckets]))

    def bucket_planted(group: Any, memory: torch.Tensor) -> Any:
        if planted() == "flipped byte" and sending == ["nccl"]:
            memory[0] ^= 1
            sending.append("flipped")
        return send_bucket(group, memory)

    def tell_planted(self: Any, message: dict[str, Any]) -> None:
        if "tensors" in message:
            if planted() == "flipped byte" and sending in (["ipc"], ["lora_ipc"]):
                self._data[message["slot"]][0] ^= 1
                sending.append("flipped")
            session, bucket = {name: message[name] for name in ("version", "nonce")}, message["tensors"]
            session, (tensors,) = in_header(planted(), session, [[TensorRecord(**t) for t in bucket]])
            message = {**message, **session, "tensors": [vars(t) for t in tensors]}
        tell(self, message)

    def refresh_planted(self: Mirror) -> None:
        plant = WRITES.get(planted(), lambda mirror, write: write())
        plant(self, lambda: refresh(self))

    Mirror.refresh = refresh_planted  # type: ignore[method-assign]
    Worker.publish, Worker._source = publish_planted, source_planted  # type: ignore[method-assign]
    nccl.send_header, nccl.send_bucket = header_planted, bucket_planted
    ipc._Stream._tell = tell_planted  # type: ignore[method-assign]


class Planted:
    """A weight source whose items are changed."""

    def __init__(self, inner: Any, plant: str):
        items = [(spec, tensor.clone()) for spec, tensor in inner]
        change = CHANGES.get(plant)
        self._items = items if change is None else change(items)
        PREVIOUS.update({spec.name: tensor for spec, tensor in items})
        self.specs, self.emits, self.config = [spec for spec, _ in self._items], inner.emits, _config(inner, plant)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


PREVIOUS: dict[str, torch.Tensor] = {}  # what the last session has sent


def _config(inner: Any, plant: str) -> dict[str, Any]:
    config = dict(getattr(inner, "config", {}))
    return {**config, "lora_alpha": 2 * config["lora_alpha"]} if plant == "scale" else config


def _at(items: Items, part: str) -> int:
    return next(i for i, (spec, _) in enumerate(items) if part in spec.name)


def _change(part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Items], Items]:
    def change(items: Items) -> Items:
        i = _at(items, part)
        spec, tensor = items[i]
        return [*items[:i], (spec, how(tensor.clone())), *items[i + 1 :]]

    return change


def _exchanged(items: Items) -> Items:
    """k and v of the first layer, which have one shape."""
    i, j = (_at(items, f"layers.0.self_attn.{x}_proj.{_last(items)}") for x in "kv")
    out = list(items)
    out[i], out[j] = (items[i][0], items[j][1]), (items[j][0], items[i][1])
    return out


def _last(items: Items) -> str:
    return "lora_B.weight" if "lora" in items[0][0].name else "weight"


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    """The rows as two ranks of tensor parallelism would hold them, in the wrong order."""
    return torch.cat(tensor.chunk(2)[::-1])


def _one_off(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 1] += 0.5
    return tensor


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = float("nan")
    return tensor


def _transposed(items: Items) -> Items:
    i = next(i for i, (s, t) in enumerate(items) if "layers.0" in s.name and t.ndim == 2 and t.shape[0] == t.shape[1])
    return [*items[:i], (items[i][0], items[i][1].T.contiguous()), *items[i + 1 :]]


def _as_float16(items: Items) -> Items:
    """The bytes of a bfloat16, said to be a float16."""
    import dataclasses

    i = _at(items, "layers.1.mlp.up_proj")
    spec, tensor = items[i]
    other = dataclasses.replace(spec, dtype=torch.float16), tensor.to(torch.bfloat16).view(torch.float16)
    return [*items[:i], other, *items[i + 1 :]]


def _more(items: Items) -> Items:
    import dataclasses

    spec, tensor = items[-1]
    return [*items, (dataclasses.replace(spec, name=spec.name.replace("weight", "more.weight")), tensor)]


def _stale(items: Items) -> Items:
    i = _at(items, f"layers.1.self_attn.o_proj.{_last(items)}")
    return [*items[:i], (items[i][0], PREVIOUS[items[i][0].name].clone()), *items[i + 1 :]]


def _of_another(items: Items) -> Items:
    """All tensors of another run."""
    generator = torch.Generator().manual_seed(7)
    return [(s, (0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype)) for s, t in items]


CHANGES: dict[str, Callable[[Items], Items]] = {
    "stale tensor": _stale,
    "exchanged tensors": _exchanged,
    "transposed": _transposed,
    "wrong shard": _change("layers.0.mlp.gate_proj", _halves),
    "transposed B": _change("layers.0.mlp.gate_proj.lora_B", lambda tensor: tensor.T.reshape(tensor.shape)),
    "wrong shard of B": _change("layers.0.mlp.gate_proj.lora_B", _halves),
    "wrong dtype": _as_float16,
    "one element off": _change("layers.0.mlp.down_proj.weight", _one_off),
    "one element of A off": _change("layers.0.mlp.down_proj.lora_A", _one_off),
    "not a number": _change("layers.0.mlp.up_proj", _nan),
    "missing tensor": lambda items: [item for item in items if item is not items[_at(items, "layers.1.mlp.up_proj")]],
    "one tensor more": _more,
    "of another run": _of_another,
}


def _row_left_out(row: int) -> Callable[[Any, Callable[[], None]], None]:
    """A write that does not come to its end: one row of a weight stays as it was."""

    def plant(mirror: Any, write: Callable[[], None]) -> None:
        view = next(tensor for name, tensor, _ in mirror._pairs if name == WRITTEN)
        old = view.detach().clone()
        write()
        view.data[row].copy_(old[row])

    return plant


def _written_elsewhere(mirror: Any, write: Callable[[], None]) -> None:
    """A write that goes into memory of the trainer's own."""
    tensor = next(tensor for name, tensor, _ in mirror._pairs if name == WRITTEN)
    view = tensor.data
    tensor.data = view.clone()
    write()
    tensor.data = view


WRITTEN = "model.layers.1.mlp.up_proj.weight"
WRITES: dict[str, Callable[[Any, Callable[[], None]], None]] = {  # of single copy
    "a row left out": _row_left_out(0),
    "a row left out that is in no sample": _row_left_out(1),
    "written elsewhere": _written_elsewhere,
}


def in_header(plant: str, session: dict[str, str], buckets: list[list[Any]]) -> tuple[Any, ...]:
    """The header of a stream, which says something else than what follows."""
    import dataclasses

    for tensors in buckets:
        ends = tuple(f"{FIRST}.{x}_proj.{last}" for x in "kv" for last in ("weight", "lora_B.weight"))
        places = [i for i, t in enumerate(tensors) if t.name.endswith(ends)]
        if len(places) < 2:
            continue
        i, j = places
        a, b = tensors[i], tensors[j]
        if plant == "another version":
            session["version"] = "0"
        elif plant == "another nonce":
            session["nonce"] = "0" * 16
        elif plant == "names exchanged":
            tensors[i], tensors[j] = dataclasses.replace(a, name=b.name), dataclasses.replace(b, name=a.name)
        elif plant == "offsets exchanged":
            tensors[i], tensors[j] = dataclasses.replace(a, offset=b.offset), dataclasses.replace(b, offset=a.offset)
        elif plant == "another dtype":
            tensors[i] = dataclasses.replace(a, dtype="int32")
    return session, buckets
