"""Memory that several processes open: on a CPU a file in shared memory, on a GPU a storage, by its CUDA IPC handle."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from instep_engine.place import open_bucket


def new_file(path: Path, num_bytes: int) -> torch.Tensor:
    """Return the bytes of a new file, uint8 `[num_bytes]`. Raises OSError: there is no room for it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # writing into a file with holes could end the process
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def file_record(path: Path, num_bytes: int) -> dict[str, Any]:
    """Return the record by which another process opens the file."""
    return {"kind": "file", "path": str(path), "bytes": num_bytes}


def cuda_record(storage: torch.UntypedStorage) -> dict[str, Any]:
    """Return the record by which one more process opens it. torch counts the openers, so each needs its own record."""
    _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return {
        "kind": "cuda",
        "bytes": size,
        "ipc_handle_b64": _base64(handle),
        "storage_size": size,
        "storage_offset": offset,
        "ref_counter_handle_b64": _base64(counter),
        "ref_counter_offset": counter_offset,
        "event_handle_b64": _base64(event),
        "event_sync_required": bool(waits),
    }


def open_memory(record: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return the bytes of another process's memory, uint8; on a GPU by its number in this process.

    Raises:
        NoPlace, OSError: a file that is not in the folder of a run, or is gone.
        RuntimeError: CUDA cannot open the handle.
    """
    if record["kind"] == "file":
        fd = open_bucket(record["path"], os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(fd, record["bytes"]), dtype=torch.uint8)
        finally:
            os.close(fd)
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        base64.b64decode(record["ipc_handle_b64"]),
        record["storage_size"],
        record["storage_offset"],
        base64.b64decode(record["ref_counter_handle_b64"]),
        record["ref_counter_offset"],
        base64.b64decode(record["event_handle_b64"]),
        record["event_sync_required"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
