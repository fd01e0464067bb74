"""Reads thousands of hostile pickles as indexes and as files of torch's, and writes down what Python did meanwhile.

`python -m tests.security.read_hostile FOLDER` prints a JSON object.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import sys
import zipfile
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed._shard.sharded_tensor.metadata
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.planner

from instep.checkpoints.dist_checkpoint import METADATA, read_index
from instep.checkpoints.torch_files import load_data
from instep.errors import CheckpointError
from tests.security import hostile

WATCHED = ("exec", "compile", "import", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pickle.",
           "object.__delattr__", "ctypes.", "socket.", "shutil.", "os.re", "os.mkdir", "os.link",
           "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.putenv", "os.unsetenv")  # fmt: skip


def nameable() -> list[Any]:
    found = []
    for where in dict.fromkeys(hostile.ALLOWED):
        module, name = where.split(" ", 1)
        found.append(getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name))
    return [item for item in found if hasattr(item, "__dict__")] + [Enum, type(Enum), Path, pickle, torch.serialization]


def shown(item: Any) -> dict[str, str]:
    return {key: f"{id(value)} {value!r:.200}" for key, value in vars(item).items() if key != "__warningregistry__"}


def archive(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as records:
        records.writestr("a/data.pkl", content)
        records.writestr("a/data/0", bytes(64))
        records.writestr("a/byteorder", "little")
        records.writestr("a/version", "3\n")
    return file.getvalue()


def main(folder: Path, every: dict[str, int]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, -1))
    honest = folder / "honest"
    state = {"w": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}
    dcp.save(state, checkpoint_id=honest)
    index, place, file = (honest / METADATA).read_bytes(), honest / METADATA, folder / "a.pt"
    saved = io.BytesIO()
    torch.save({"w": torch.ones(16), "step": 3, "args": Counter(a=1)}, saved)
    with zipfile.ZipFile(saved) as records:
        pickled = records.read("archive/data.pkl")
    events: list[str] = []
    allowed = {str(place), str(file)}

    def watch(event: str, args: tuple[Any, ...]) -> None:
        again = event == "open" and type(args[0]) is int and args[1] in ("r", "rb")  # a file object of what is open
        opens = event == "open" and not again and (str(args[0]) not in allowed or (args[2] or 0) & 3)
        if watching and (opens or event.startswith(WATCHED)):
            events.append(f"{event} {args!r:.100}")

    watching = False
    sys.addaudithook(watch)
    before = [shown(item) for item in nameable()]
    read_index(honest)
    file.write_bytes(archive(pickled))
    load_data(file)  # zipfile has imported the names' encoding
    ends: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, one, read in (("index", index, read_index), ("file", pickled, load_data)):
        where = honest if kind == "index" else file
        for number, content in enumerate(hostile.all_of(one)):
            if number % every[kind]:
                continue
            target = place if kind == "index" else file
            target.write_bytes(content if kind == "index" else archive(content))
            watching = True
            try:
                read(where)
                end = "read"
            except CheckpointError as error:
                end = "refused" if error.remedy and error.where and len(error.what) < 500 else f"badly said: {error}"
            except Exception as error:  # noqa: BLE001
                end = f"{type(error).__name__}: {error!s:.80} from {content[:60]!r}"
            watching = False
            ends[f"{kind} {end}"] += 1
    return {
        "ends": ends,
        "events": events,
        "changed": [repr(item) for item, was in zip(nameable(), before, strict=True) if shown(item) != was],
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), {"index": int(sys.argv[2]), "file": int(sys.argv[3])})))
