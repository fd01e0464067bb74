"""`vllm_bridge_config.json`: how a server that a user started by hand shows a trainer where its weights are.

It is in `$LOGDIR`, or where the server was started (or is `$VLLM_BRIDGE_CONFIG_PATH`), and only its user can read it.
The keys are those of Atropos' example trainer. `instep` names the folder in which every worker has written
`memory-RANK.json`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from instep_engine import PROTOCOL
from instep_engine.memory import Memory, write_private
from instep_engine.place import SYNC, process_mark

NAME = "vllm_bridge_config.json"
LOCK = ".instep-scratch"  # marks folders whose owner was killed; instep removes them


class Bridge:
    """The folder of a server without a run, and the file that points to it; made by the worker of rank 0."""

    def __init__(self) -> None:
        root = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = Path(tempfile.mkdtemp(prefix=f"{SYNC}vllm-", dir=root)).absolute()
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        boot = process_mark(os.getpid()).partition(" ")[0]
        os.write(self._lock, f"process {os.getpid()} on {socket.gethostname()} {boot}".encode())
        named = os.environ.get("VLLM_BRIDGE_CONFIG_PATH")  # as Atropos' example server reads it
        self.path = Path(named or os.path.join(os.environ.get("LOGDIR") or ".", NAME)).absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        model: str,
        nonce: str,
        tensor_parallel: int,
        parameters: Iterable[tuple[str, torch.Tensor]],
        memories: Sequence[Memory],
    ) -> None:
        """Write the file, with the parameters of this worker."""
        named = dict(parameters)
        handles = {memory.begin: memory.record for memory in memories if memory.record["kind"] == "cuda"}
        about = {name: {"shape": list(p.shape), "dtype": str(p.dtype)} for name, p in named.items()}
        config: dict[str, Any] = {
            "model": model,
            "tp_degree": tensor_parallel,
            "dp_shard_degree": 1,
            "param_names": list(named),
            "param_mappings": {n: {"vllm_name": n, **about[n], "device": str(p.device)} for n, p in named.items()},
            "ipc_handles": {
                name: {"device_index": p.device.index, **handles[p.data_ptr()], **about[name]}
                for name, p in named.items()
                if p.data_ptr() in handles
            },
            "shared_weights_enabled": True,
            "single_copy_enabled": True,
            "num_params": len(named),
            "instep": {
                "protocol": PROTOCOL,
                "folder": str(self.folder),
                "nonce": nonce,
                "process": process_mark(os.getpid()),
            },
        }
        write_private(self.path, json.dumps(config, indent=1))

    def remove(self) -> None:
        """Remove the folder, and the file unless it now belongs to another server."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            ours = json.loads(self.path.read_text())["instep"]["folder"] == str(self.folder)
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        if ours:
            self.path.unlink(missing_ok=True)
