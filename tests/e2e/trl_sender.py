"""A trainer's side of TRL's two weight protocols, written from their description: HTTP, a TCP store, and gloo.

As a program it sends half of an update (or pauses the engines), and then waits to be killed:
`trl_sender.py URL PORT legacy|new|pause CHECKPOINT`.
"""

import base64
import http.client
import json
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file

SECONDS = timedelta(seconds=120)
PACKED_BYTES = 1 << 30


class Refusal(Exception):
    def __init__(self, status, text, reason):
        super().__init__(text)
        self.status, self.reason = status, reason


class Http:
    """One connection that stays open, as that of a client's session does."""

    def __init__(self, url):
        at = urlsplit(url)
        token = base64.b64encode(f"{at.username}:{at.password}".encode()).decode()
        self._headers = {"Content-Type": "application/json"}
        if at.username:
            self._headers["Authorization"] = f"Basic {token}"
        self._connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)

    def status(self, path, body=None, method="POST"):
        """The status of an answer."""
        try:
            self(path, body, method)
        except Refusal as refusal:
            return refusal.status
        return 200

    def __call__(self, path, body=None, method="POST", **headers):
        self._connection.request(method, path, json.dumps(body or {}), self._headers | headers)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise Refusal(answer.status, text, answer.reason)
        return json.loads(text)

    def close(self):
        self._connection.close()


class Sender:
    """A trainer that speaks one of the two protocols."""

    def __init__(self, url, port, legacy):
        self.http, self.port, self.legacy, self.rank = Http(url), port, legacy, int(legacy)
        self._threads, self._barriers = ThreadPoolExecutor(1), 0

    def join(self, patience=0.2):
        """Join the group; a refusal is waited for as long. Raises Refusal."""
        if self.legacy:
            size = self.http("/get_world_size/", method="GET")["world_size"] + 1
            body = {"host": "0.0.0.0", "port": self.port, "world_size": size, "client_device_uuid": "none"}
            self.http("/init_communicator/", body)
            self.store = dist.TCPStore("127.0.0.1", self.port, 2, False, SECONDS)
            assert pickle.loads(self.store.get("broadcast_from/0/0"))
            self._gloo()
        else:
            info = {"master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1, "world_size": 2}
            joined = self._threads.submit(self.http, "/init_weight_transfer_engine", {"init_info": info})
            if wait([joined], patience).done:
                joined.result()
            self.store = dist.TCPStore("127.0.0.1", self.port, 2, True, SECONDS, wait_for_workers=False)
            self.store.set("broadcast_from/0/0", pickle.dumps(b"gloo"))
            self._gloo()
            joined.result(30)

    def _gloo(self):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SECONDS
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("instep-gloo", self.store), self.rank, 2, options)
        self.group.allreduce([torch.zeros(1)]).wait()

    def _broadcast(self, data):
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.rank, 0
        self.group.broadcast([data], options).wait()

    def _barrier(self):
        self._barriers += 1
        name = pickle.loads(self.store.get(f"broadcast_from/0/{self._barriers}"))
        self.store.set(f"arrival_{name}_1", b"1")
        self.store.wait([f"arrival_{name}_0"], SECONDS)
        self.store.set(f"departure_{name}_1", b"1")

    def send(self, tensors):
        """Send named tensors; those of the newer protocol are one update. Raises Refusal."""
        if self.legacy:
            for name, tensor in tensors.items():
                shape = list(tensor.shape)
                self.http("/update_named_param/", {"name": name, "dtype": str(tensor.dtype), "shape": shape})
                self._broadcast(as_bytes(tensor))
                self._barrier()
        else:
            self.http("/start_weight_update")
            self.stream(tensors)
            self.http("/finish_weight_update")

    def announce(self, tensors):
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
        info = {"names": list(tensors), "dtype_names": dtypes, "shapes": [list(t.shape) for t in tensors.values()]}
        return self._threads.submit(self.http, "/update_weights", {"update_info": {**info, "packed": True}})

    def stream(self, tensors):
        """Announce tensors and send them, packed (they are fewer than 1 GiB)."""
        done = self.announce(tensors)
        self._broadcast(torch.cat([as_bytes(t) for t in tensors.values()]))
        done.result(60)

    def end(self):
        """The end of an update as TRL's trainers have it."""
        return self.http("/reset_prefix_cache/" if self.legacy else "/reset_prefix_cache")

    def close(self):
        if self.legacy:
            self.http("/close_communicator/")
        self.group = self.store = None
        self.http.close()


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights_of(checkpoint):
    return load_file(f"{checkpoint}/model.safetensors")


if __name__ == "__main__":
    url, port, wire, checkpoint = sys.argv[1:]
    sender, tensors = Sender(url, int(port), wire == "legacy"), weights_of(checkpoint)
    sender.join()
    if wire == "pause":
        sender.http("/pause?mode=keep")
        print("paused", flush=True)
        time.sleep(600)
    half = dict(list(tensors.items())[: len(tensors) // 2])
    if sender.legacy:
        sender.send(half)
    else:
        sender.http("/start_weight_update")
        sender.stream(half)
        sender.announce(tensors)
    print("half is sent", flush=True)
    time.sleep(600)
