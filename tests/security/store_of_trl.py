"""A store of TRL's weight group with few descriptors, and its other member: `... store_of_trl PORT`."""

import resource
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from instep_engine.gloo import shut
from instep_neighbours.trl.receiver import Meeting, _store

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
meeting = Meeting("127.0.0.1", int(sys.argv[1]), 0, "cpu", 300.0)
store, doors = _store(meeting)
trainer = dist.TCPStore("127.0.0.1", meeting.port, 2, is_master=False, timeout=timedelta(seconds=300))
print("open", flush=True)
sys.stdin.readline()
try:
    while True:  # until the flood has used the descriptors up
        open("/dev/null").close()
        time.sleep(0.01)
except OSError:
    pass
store.set("a", "1")
answer = trainer.get("a")
shut(doors)
print(answer, flush=True)
sys.stdin.readline()
store.set("b", "2")
print(trainer.get("b"), flush=True)
