"""The client of an env server of verifiers >= 0.4: ZeroMQ, a DEALER to its ROUTER, msgpack.

A request is `[id, method, payload]` with the methods `health`, `run` and `cancel`. An answer is `[id, kind, payload]`,
of kind `reply`. Before the reply to a `run` there may be any number of kind `delta`, with the growing traces.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any

from instep.errors import ConfigError, RolloutError
from instep.system.processes import SupervisedProcess

_LISTS = ("nodes", "calls", "errors")
HEARTBEAT_SECONDS, SILENT_SECONDS = 1, 5  # of ZeroMQ itself, which answers even if the server's Python is busy
CANCEL_SECONDS = 3.0  # for an episode to end after a cancel


class ServerLostError(Exception):
    """The connection to the server is lost, and with it the server's episodes."""


def require_packages() -> None:
    """Raise ConfigError without the two packages of the protocol, which a base install does not have."""
    try:
        import msgpack  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        what = f"the protocol of env servers needs {error.name}"
        raise ConfigError(what, where="--env", remedy="pip install 'pyzmq>=27.1' 'msgpack>=1.1'") from None


@functools.cache
def _context() -> Any:
    """Return ZeroMQ's threads and sockets. They are never ended: that would wait for every open socket."""
    import zmq.asyncio

    return zmq.asyncio.Context()


class Assembly:
    """The traces of one episode, joined from deltas. Only the data for samples and `calls` are kept."""

    def __init__(self) -> None:
        self._traces: dict[str, dict[str, Any]] = {}

    def apply(self, delta: dict[str, Any]) -> None:
        """Apply one delta. Lists grow, `set` replaces values, `links` add to existing nodes."""
        name = delta["trace"]
        if delta.get("discard"):  # an attempt that verifiers repeats
            self._traces.pop(name, None)
            return
        trace = self._traces.setdefault(name, {"id": name, **{field: [] for field in _LISTS}})
        for index, links in (delta.get("links") or {}).items():
            node = trace["nodes"][int(index)]
            node["semantic_parents"] = [*(node.get("semantic_parents") or ()), *links]
        for field in _LISTS:
            trace[field] += delta.get(field) or ()
        trace |= delta.get("set") or {}

    def finish(self, head: dict[str, Any], sizes: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the episode: `head` with its `traces` in the server's order. Raises RolloutError if a delta is
        missing."""
        traces = []
        for size in sizes:
            trace = self._traces.get(size["id"], {"nodes": [], "calls": []})
            have, said = [len(trace["nodes"]), len(trace["calls"])], [size["nodes"], size["calls"]]
            if size["id"] not in self._traces or have != said:
                what = f"trace {size['id']} came with {have[0]} nodes and {have[1]} calls of {said[0]} and {said[1]}"
                raise RolloutError(what, where="the env server", remedy="use verifiers 0.4 on both sides")
            traces.append(trace)
        return {**head, "traces": traces}


class Client:
    """A connection to one server, of the event loop that makes it.

    Args:
        process: of the server; None: it does not belong to the run.
    """

    def __init__(self, address: str, process: SupervisedProcess | None = None):
        import zmq

        self.address, self.process = address, process
        self._socket = _context().socket(zmq.DEALER)
        options = {zmq.LINGER: 0, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.HEARTBEAT_IVL: 1000 * HEARTBEAT_SECONDS}
        options |= {zmq.HEARTBEAT_TIMEOUT: 1000 * SILENT_SECONDS, zmq.RECONNECT_IVL: 100}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._waiting: dict[bytes, tuple[asyncio.Future[Any], Assembly]] = {}
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @property
    def num_running(self) -> int:
        """The number of its running episodes."""
        return len(self._waiting)

    async def health(self, timeout: float) -> bool:
        """Return whether the server answers within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._ask("health", {}, Assembly())
        except TimeoutError:
            return False
        return True

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one episode and return it, a dict with its `traces`. If this call is cancelled, it cancels the episode.

        Raises:
            ServerLostError: the server has ended, or is silent.
            RolloutError: the server has refused the request, or its answer is not whole.
        """
        assembly = Assembly()
        reply = await self._ask("run", request, assembly)
        if not reply.get("success") or reply.get("head") is None:
            what = f"the env server has refused an episode: {reply.get('error')}"
            raise RolloutError(what, where=self.address, remedy="see its log, and --env-args")
        return assembly.finish(reply["head"], reply["traces"])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose()
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket):
            socket.close(linger=0)

    async def _ask(self, method: str, payload: dict[str, Any], assembly: Assembly) -> dict[str, Any]:
        name, future = uuid.uuid4().hex.encode(), asyncio.get_running_loop().create_future()
        self._waiting[name] = future, assembly
        try:
            await self._send(name, method, payload)
            reply: dict[str, Any] = await asyncio.shield(future)
            return reply
        except asyncio.CancelledError:
            if method == "run":
                await self._send(uuid.uuid4().hex.encode(), "cancel", {"request_id": name.decode()})
                await asyncio.wait([future], timeout=CANCEL_SECONDS)  # so that it sends no more requests to the engines
            raise
        finally:
            self._waiting.pop(name, None)
            future.cancel()

    async def _send(self, name: bytes, method: str, payload: dict[str, Any]) -> None:
        import msgpack

        await self._socket.send_multipart([name, method.encode(), msgpack.packb(payload)])

    async def _receive(self) -> None:
        import msgpack

        while True:
            frames = await self._socket.recv_multipart()
            future, assembly = self._waiting.get(frames[0], (None, None))
            if future is None or assembly is None or future.done():
                continue  # of a cancelled episode, or of a request after its time limit
            try:
                if len(frames) != 3 or frames[1] not in (b"delta", b"reply"):
                    raise ValueError(f"{len(frames)} frames; before 0.4, verifiers had another protocol")
                data = msgpack.unpackb(frames[2], strict_map_key=False)
                if frames[1] == b"delta":
                    assembly.apply(data)
                elif isinstance(data, dict):
                    future.set_result(data)
                else:
                    raise ValueError(f"a reply that is a {type(data).__name__}")
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # of the server's data
                what, remedy = f"an answer in another format: {error!r}", "use verifiers 0.4 on both sides"
                future.set_exception(RolloutError(what, where=self.address, remedy=remedy))

    async def _watch(self) -> None:
        while True:
            await self._monitor.recv_multipart()  # disconnected: its process has ended, or its heartbeats
            self._lose()

    def _lose(self) -> None:
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(ServerLostError(self.address))
                future.exception()  # marks it as seen, even if no one waits any more
