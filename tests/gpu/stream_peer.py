"""A receiver of the way `nccl` in a process of its own: `python -m tests.gpu.stream_peer DEVICE`.

Each line on stdin is the `update_info` of a session, or {"broadcast": BYTES}; each is answered by a line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from instep_engine.checksums import checksum
from instep_engine.stream import Group, Invitation, open_store, receive


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group: Group | None = None
    held: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        info, began = json.loads(line), time.monotonic()
        if "broadcast" in info:
            assert group is not None
            group.broadcast(torch.empty(info["broadcast"], dtype=torch.uint8, device=device), began + 60)
            answer: dict[str, Any] = {}
        else:
            invitation = Invitation(**info["invitation"])
            if group is None or group.name != invitation.group:
                group = Group(open_store(invitation.store, 60.0), invitation, device, 60.0)

            def load(tensors: dict[str, torch.Tensor], dies: bool = info.get("die", False)) -> None:
                if dies:
                    os._exit(1)
                for name, tensor in tensors.items():
                    if name in held:
                        held[name].copy_(tensor)
                    else:
                        held[name] = tensor.clone()

            receive(group, {"version": "3", "nonce": "nonce"}, load, began + 60)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.monotonic() - began
            answer = {"seconds": seconds}
            if info.get("digests"):
                answer["digests"] = {name: checksum(tensor) for name, tensor in held.items()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
