"""A member of a group of gloo with few descriptors: `python -m tests.security.gloo_member RANK FILE guarded|bare`."""

import json
import os
import resource
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from instep_engine import gloo

rank, file, guards = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "guarded"
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if guards:
    gloo.guard_groups()
    gloo.guard_groups()
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=timedelta(seconds=300))
assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
ports = [socket.socket(fileno=os.dup(fd)).getsockname()[1] for fd in gloo._listeners()]
print(json.dumps(ports), flush=True)
ones = torch.ones(4)
for line in sys.stdin:
    group = dist.new_group([0, 1]) if line.strip() == "new" else None
    dist.barrier(group)
    total = ones.clone()
    dist.all_reduce(total, group=group)
    print(int(total.sum()), len(os.listdir("/proc/self/fd")), flush=True)
