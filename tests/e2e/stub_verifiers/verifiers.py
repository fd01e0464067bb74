"""In place of the package `verifiers`: the names that a run's host process uses, and the protocol of its env server.

Its tasks are a few token ids, its episodes two turns: what the engine answers, two tokens of the user, and what the
engine answers then. The first episode of the first server kills it.
"""

import json
import os
import signal
import sys
import threading
import types
import urllib.request
from types import SimpleNamespace

import msgpack
import zmq

__version__ = "0.4.0"


class Tasks(list):
    bounded = True

    def select(self, config):
        return Tasks(self[: config.get("limit")])


class Data(SimpleNamespace):
    name = id = None

    def model_dump(self, mode):
        return dict(vars(self))


def load_taskset(config):
    return Tasks(SimpleNamespace(data=Data(idx=i, prompt_text=f"task {i}", ids=[5 + i, 6, 7])) for i in range(9))


def turn(request, ids):
    """The engine's answer to `ids`: ids, log-probs and why it ended."""
    client = request["client"]
    url = client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    sampling = {**request["sampling"], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": request["model"], "token_ids": ids, "sampling_params": sampling, "cache_salt": "a", "priority": 0}
    headers = {**client["headers"], "Content-Type": "application/json", "X-Session-ID": "s"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    (choice,) = json.loads(urllib.request.urlopen(asked, timeout=60).read())["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    return choice["token_ids"], [entry["logprob"] for entry in content], choice["finish_reason"]


def episode(request, send):
    if not os.path.exists(marker := os.environ["STUB_MARKER"]):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    nodes, calls, ids, all_log_probs = [], [], [], []
    for n in range(2):
        new = request["task_data"]["ids"] if n == 0 else [8, 9]
        sampled, log_probs, reason = turn(request, [*ids, *new])
        ids += [*new, *sampled]
        all_log_probs += log_probs
        mask = [False] * len(new) + [True] * len(sampled)
        node = {"parent": n - 1 if n else None, "token_ids": [*new, *sampled], "mask": mask, "logprobs": log_probs}
        nodes.append({**node, "sampled": True})
        calls.append({"node": n, "finish_reason": reason, "sampling": {}})
        send(b"delta", {"trace": "t", **({} if n else {"open": {"id": "t"}}), "nodes": nodes[n:], "calls": calls[n:]})
    reward = {"even": {"score": float(sum(ids) % 2 == 0), "weight": 1.0}}
    send(b"delta", {"trace": "t", "set": {"rewards": reward, "metrics": {}, "stop_condition": "done"}})
    head = {"ok": True, "errors": []}
    send(b"reply", {"success": True, "error": None, "head": head, "traces": [{"id": "t", "nodes": 2, "calls": 2}]})


def serve_env(*, max_workers, address, config):
    context = zmq.Context()
    socket, done = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    socket.bind(address)
    done.bind("inproc://done")

    def run(client, name, request):
        to_server = context.socket(zmq.PUSH)
        to_server.connect("inproc://done")
        episode(request, lambda kind, data: to_server.send_multipart([client, name, kind, msgpack.packb(data)]))
        to_server.close()

    poller = zmq.Poller()
    for one in (socket, done):
        poller.register(one, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if done in ready:
            socket.send_multipart(done.recv_multipart())
        if socket in ready:
            client, name, method, payload = socket.recv_multipart()
            if method == b"run":
                threading.Thread(target=run, args=(client, name, msgpack.unpackb(payload)), daemon=True).start()
            else:
                socket.send_multipart([client, name, b"reply", msgpack.packb({"success": True, "error": None})])


def module(name, **members):
    sys.modules[f"verifiers.{name}"] = made = types.ModuleType(f"verifiers.{name}")
    vars(made).update(members)


__path__ = []  # so that it counts as a package
module("v1", __path__=[])
module("v1.serve", serve_env=serve_env)
module("v1.utils", __path__=[])
module("v1.utils.loaders", load_taskset=load_taskset, resolve_env_config=lambda given: SimpleNamespace(taskset=given))
module("v1.configs", __path__=[])
module("v1.configs.select", SelectConfig=SimpleNamespace(model_validate=dict))
