"""Weight updates by other projects' trainers: who has the weight group, what was received, how engines get it.

One thread does all that waits. It joins the group, receives, and brings a whole version to the engines by a session
(`controller/sync/session.py`), so these never run at the same time. While a version goes to the engines, running text
requests have ended and new ones wait (`rollout/request_gate.py`). Receiving blocks no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from instep.arguments.args import Args
from instep.cluster.local import WorkerGroup
from instep.controller.fleet import Fleet
from instep.errors import EngineError, InstepError, SyncError, WorkerError
from instep.rollout.request_gate import gate
from instep.system.gpus import visible_gpus
from instep_neighbours.trl.clients import BadRequest, Body, Client, Connection, Refused, of_type, one_line
from instep_neighbours.trl.delivery import Delivery
from instep_neighbours.trl.receiver import PACKED_BYTES, Announced, Meeting
from instep_neighbours.trl.staging import Incoming, Layout

T = TypeVar("T")
JOIN_SECONDS = 300.0  # vLLM's own limit for the store
ALIVE_SECONDS = 5.0
CLOSING_SECONDS = 0.2
RECEIVER = "instep_neighbours.trl.receiver"
DROPPED = "this update is dropped, and the engines keep their weights"


class Updates:
    """All weight updates of one server. Methods without an underscore belong to the thread of the event loop.

    Those that take `http` and `body` answer a request with an object, or raise Refused.

    Args:
        args: of `instep serve`, with `sync_timeout`.
        layout: of the checkpoint that is served.
        folder: in shared memory, for staged weights.
        host: where the store of a group listens if this server owns it.
        say: shows a line to the user.
    """

    def __init__(
        self, args: Args, fleet: Fleet, layout: Layout, folder: Path, logs: Path, host: str, say: Callable[[str], None]
    ):
        self._args, self._fleet, self._layout, self._logs = args, fleet, layout, logs
        self._host, self._say = host, say
        self.takes_none = layout.refusal  # why all weights are refused; "" if they are accepted
        self.delivery = Delivery(args, fleet, layout, folder)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._group: WorkerGroup | None = None
        self._client: Client | None = None
        self._incoming: Incoming | None = None
        self._faults: dict[str, str] = {}  # host of a client whose update has failed -> the unreported error
        self._paused: tuple[float, Client | None] | None = None  # by a client: since when, and who had the group then
        self._num_waiting = 0  # for the thread: jobs of clients

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end_group()
        gate().reset()

    # ---- the group ---------------------------------------------------------------------------------------------------

    async def init_legacy(self, http: web.Request, body: Body) -> Body:
        """Let the trainer of TRL <= 1.10 join, as rank 1 of our store; answer at once."""
        port, size = of_type(body, "port", int), of_type(body, "world_size", int)
        uuid = of_type(body, "client_device_uuid", str, None)
        if size != 2:
            raise Refused(f"world_size is {size}: this server is one rank, so it must be 2 (/get_world_size/)")
        gpus = visible_gpus()[: self._args.rollout_num_gpus] if self._args.device == "cuda" and uuid else ()
        if any(uuid in gpu.uuid for gpu in gpus):
            raise Refused(
                f"the trainer's GPU {uuid} is one of the server's: give each its own GPUs with CUDA_VISIBLE_DEVICES"
            )
        self._begin(await self._admit(Connection.of(http), legacy=True), self._join, self._host, port, 0)
        return {"message": "Request received, initializing communicator"}

    async def init(self, http: web.Request, body: Body) -> Body:
        """Join the group of the trainer of TRL >= 1.11, which is rank 0."""
        info = of_type(body, "init_info", dict)
        host, port = of_type(info, "master_address", str), of_type(info, "master_port", int)
        if (size := info.get("world_size")) != 2 or info.get("rank_offset") != 1:
            raise Refused(f"world_size is {size}: this server is one rank, 1 of 2 (/get_world_size answers 1)")
        client = await self._admit(Connection.of(http), legacy=False, packed_bytes=_packed_bytes(info))
        await self._do(client, self._join, host, port, 1)
        return {"message": "Weight transfer initialized"}

    async def leave(self, http: web.Request, body: Body) -> Body:
        """Let the trainer go. An incomplete update is dropped, a complete one is brought to the engines."""
        client = self._client
        if client is not None and client.host == Connection.of(http).host:
            if self._incoming is None:
                await self._run(lambda: None)  # after all earlier jobs of the thread
            self._drop(client)
        return {"message": "Request received, closing communicator"}

    async def check_free(self, connection: Connection) -> None:
        """Raise Refused if the client of this connection would not get the weight group now.

        The trainer of TRL >= 1.11 must know this before it inits the group: afterwards it waits for NCCL without a
        limit, and ignores the answer.
        """
        if self.takes_none:
            raise Refused(self.takes_none)
        holder = self._client
        if holder is None or connection in holder.connections:
            return
        if await self._holds(holder):
            why = (
                f"the trainer at {holder.peer} has the weight group since {holder.since}; one trainer at a time sends "
                "weights: end it (or let it close its communicator), and try again"
            )
            self._say(f"the trainer at {connection.peer} was refused: {why}")
            raise Refused(why)
        if self._client is holder:
            self._drop(holder)

    async def _admit(self, connection: Connection, legacy: bool, packed_bytes: int | None = None) -> Client:
        await self.check_free(connection)
        if self._client is not None and connection in self._client.connections:
            self._drop(self._client)
        if self._client is not None:
            raise Refused(f"the trainer at {self._client.peer} was first: it has the weight group now")
        self._client, self._incoming = Client(legacy, [connection], packed_bytes), None
        self._faults.pop(connection.host, None)
        return self._client

    async def _holds(self, client: Client) -> bool:
        """Return whether it still has the group: a connection is open, or its store answers."""
        if client.connected and not client.given_up:
            await asyncio.sleep(CLOSING_SECONDS)  # it may have closed its connection just now
        if client.legacy or client.given_up:
            return client.connected and not client.given_up
        if self._num_waiting:
            return True
        return await asyncio.wrap_future(self._thread.submit(self._is_joined))

    def _drop(self, client: Client) -> None:
        client.given_up = True
        self._client = self._incoming = None
        self._thread.submit(self._end_group)

    def _holder(self, http: web.Request, legacy: bool) -> Client:
        """Return the client that has the group; only it may change weights. Raises Refused."""
        connection = Connection.of(http)
        self._tell_fault(connection.host)
        if self._client is None or self._client.legacy != legacy:
            route = "/init_communicator/" if legacy else "/init_weight_transfer_engine"
            raise Refused(f"you have no weight group: POST {route} first")
        if connection not in self._client.connections:
            self._client.connections.append(connection)
        return self._client

    def _tell_fault(self, host: str) -> None:
        """Raise Refused with the unreported fault of a client."""
        if fault := self._faults.pop(host, ""):
            raise Refused(fault)

    # ---- an update ---------------------------------------------------------------------------------------------------

    async def start(self, http: web.Request, body: Body) -> Body:
        """Start an update (TRL >= 1.11); an unfinished one is dropped."""
        if body.get("is_checkpoint_format", True) is not True:
            raise BadRequest("is_checkpoint_format: weights come under the names of the checkpoint, or not at all")
        self._holder(http, legacy=False)
        self._incoming = Incoming(self._layout)
        return {"message": "Weight update started"}

    async def announce(self, http: web.Request, body: Body) -> Body:
        """Receive one tensor (TRL <= 1.10); the last one ends the update. Answer at once."""
        given = body.get("name"), body.get("dtype"), body.get("shape")
        client = self._holder(http, legacy=True)
        incoming = self._incoming or Incoming(self._layout)
        what, wrong = incoming.announce_all([given])
        if wrong:
            self._incoming = None
            raise Refused(f"{wrong}; {DROPPED}")
        self._incoming = incoming
        self._begin(client, self._receive, incoming, what, None)
        if not incoming.missing:
            self._incoming = None
            gate().close()  # later text requests get their answers from the new weights
            self._begin(client, self._bring, incoming)
        return {"message": "Request received, updating named parameter"}

    async def update(self, http: web.Request, body: Body) -> Body:
        """Receive tensors (TRL >= 1.11)."""
        info = of_type(body, "update_info", dict)
        client = self._holder(http, legacy=False)
        incoming = self._started()
        columns = [of_type(info, name, list) for name in ("names", "dtype_names", "shapes")]
        if len({len(column) for column in columns}) > 1:
            raise BadRequest("names, dtype_names and shapes must have the same length")
        packed_bytes = _packed_bytes(info) if "packed" in info else client.packed_bytes
        what, wrong = incoming.announce_all(zip(*columns, strict=True))
        # The trainer already broadcasts: it must send all announced tensors before it gets the error.
        await self._do(client, self._receive, incoming, what, packed_bytes)
        if wrong:
            self._incoming = None
            raise Refused(f"{wrong}; {DROPPED}")
        return {"message": "Weights updated"}

    async def finish(self, http: web.Request, body: Body) -> Body:
        """Bring the received weights to the engines (TRL >= 1.11)."""
        client = self._holder(http, legacy=False)
        incoming, self._incoming = self._started(), None
        incoming.check_whole()
        await self._do(client, self._bring, incoming)
        return {"message": "Weight update finished"}

    def _started(self) -> Incoming:
        if self._incoming is None:
            raise Refused("no update was started: POST /start_weight_update first")
        return self._incoming

    async def reset(self, http: web.Request, body: Body) -> Body:
        """Wait for the update of a legacy client, and make the engines drop their caches.

        `success` says whether all did; a busy engine keeps its cache.
        """
        connection, client = Connection.of(http), self._client
        if client is not None and client.legacy and client.host == connection.host:
            await self._run(lambda: None)  # after all earlier jobs of the thread
            if self._client is client and self._incoming is not None and self._incoming.begun:
                incoming, self._incoming = self._incoming, None
                incoming.check_whole()
        self._tell_fault(connection.host)
        kept: list[bool] = []

        def reset_caches() -> None:
            self.delivery.each(lambda e: kept.append(e.kind.reset_cache(e, timeout=self._args.sync_timeout) is False))

        try:
            await asyncio.to_thread(reset_caches)
        except EngineError as error:
            raise Refused(one_line(error), 503) from error
        message = f"Request received, resetting prefix cache status: {not any(kept)}"
        return {"success": not any(kept), "message": message}

    # ---- pauses ------------------------------------------------------------------------------------------------------

    async def pause(self, http: web.Request, body: Body) -> Body:
        """Stop generation until `resume`, while the trainer is alive, for `--sync-timeout` at most.

        A second request does not extend it.
        """
        default = "keep" if http.path == "/bridge/pause" else "abort"  # Atropos'
        if (mode := body.get("mode", http.query.get("mode", default))) not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode={mode!r}: use abort, wait or keep")
        holder = self._client
        pauser = holder if holder is not None and await self._holds(holder) else None
        if self._paused is None:
            self._paused = time.monotonic(), pauser
        self.delivery.paused = True
        await self._run(lambda: self.delivery.each(lambda e: e.pause(mode, timeout=self._args.sync_timeout)))
        return {"status": "paused"}

    async def resume(self, *_: object) -> Body:
        """Continue generation; also refused if the version that came meanwhile cannot be proven."""
        try:
            await self._run(self.delivery.resume)
        except Refused as error:
            if not self.delivery.paused:
                self._say(f"weights that came while the engines were paused: {error}")
            raise
        finally:
            if not self.delivery.paused:
                self._paused = None
        return {"status": "resumed"}

    async def look(self) -> None:
        """End a pause after its limit, and bring the weights to restarted engines; called repeatedly."""
        if self._paused is not None and (why := await self._why_resume(*self._paused)):
            await self.resume()
            self._say(f"{why}: the engines continue")
        for engine in self._fleet.waiting():
            await self._run(partial(self.delivery.rejoin, engine))

    async def _why_resume(self, since: float, pauser: Client | None) -> str:
        """Return why a pause is over without a resume; "" if it is not."""
        if pauser is not None and (self._client is not pauser or not await self._holds(pauser)):
            if self._client is pauser:
                self._drop(pauser)
            return f"the trainer at {pauser.peer}, which has paused the engines, has lost the weight group"
        bound = self._args.sync_timeout
        return f"no client has resumed the engines for {bound:.0f} s" if time.monotonic() - since > bound else ""

    # ---- in the thread -----------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except (EngineError, SyncError) as error:
            raise Refused(one_line(error), 503) from error

    async def _do(self, client: Client, work: Callable[..., None], *given: Any) -> None:
        """Run a part of the client's update, and wait for it. Raises Refused."""
        try:
            await asyncio.wrap_future(self._begin(client, work, *given))
        except asyncio.CancelledError:
            client.given_up = True  # its request has ended, and the update with it
            raise
        if client.given_up:
            raise Refused(self._faults.pop(client.host, "this update was given up: init the weight group again"))

    def _begin(self, client: Client, work: Callable[..., None], *given: Any) -> Future[None]:
        """Queue a part of the client's update for the thread, unless it is given up by then."""

        def guarded() -> None:
            try:
                if not client.given_up:
                    work(client, *given)
            except (InstepError, OSError) as error:
                self._fail(client, error)
            finally:
                self._num_waiting -= 1
                if client.given_up:
                    gate().open()

        self._num_waiting += 1
        return self._thread.submit(guarded)

    def _fail(self, client: Client, error: Exception) -> None:
        self._say(f"weights from {client.peer}: {one_line(error)}")
        if not client.given_up:
            self._faults[client.host] = f"{one_line(error)}; then init the weight group again"
        client.given_up = True
        if self._client is client:
            self._client = self._incoming = None
        self._end_group()

    def _is_joined(self) -> bool:
        if self._group is not None:
            self._group.watch = self._group.check_alive  # a trainer without an open connection may be alive
            with suppress(WorkerError):
                return bool(self._group.call("alive", timeout=ALIVE_SECONDS)[0])
        return False

    def _end_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close(0.5)

    def _join(self, client: Client, host: str, port: int, rank: int) -> None:
        self._end_group()
        env = {"OMP_NUM_THREADS": "1"}
        self._group = WorkerGroup("receiver", 1, self._logs, env, self._args.heartbeat_timeout, RECEIVER)
        self._call(client, "join", Meeting(host, port, rank, self._args.device, JOIN_SECONDS), seconds=JOIN_SECONDS)
        self._say(f"the trainer at {client.peer} has the weight group")

    def _receive(self, client: Client, incoming: Incoming, what: list[Announced], packed_bytes: int | None) -> None:
        incoming.slot = slot = incoming.slot or self.delivery.free_slot()
        seconds = self._args.sync_timeout
        found = self._call(client, "receive", what, slot.paths, packed_bytes, client.legacy, seconds=seconds)
        for one, (digests, finite) in zip(what, found, strict=True):
            incoming.take(one, digests, finite)
        self.delivery.forget_tied(incoming)

    def _call(self, client: Client, method: str, *given: Any, seconds: float) -> Any:
        if self._group is None:
            raise SyncError("it has ended", where="the weight group", remedy="init it again")
        group = self._group

        def watch() -> None:
            client.check()
            group.check_alive()

        group.watch = watch
        try:
            return group.call(method, *given, timeout=seconds)[0]
        except WorkerError as error:
            what = f"the process that receives weights failed in '{method}'"
            remedy = "init the weight group again; if it happens again, see its log (receiver-rank0.log)"
            raise SyncError(f"{what}: {error.what[:500]}", where=error.where[:500], remedy=remedy) from error

    def _bring(self, client: Client, incoming: Incoming) -> None:
        self._say(f"weights from {client.peer}: {self.delivery.bring(incoming)}")


def _packed_bytes(info: Body) -> int | None:
    """Return the size of the buffers of tensors; None: they come one by one. Raises BadRequest."""
    size: int = of_type(info, "packed_buffer_size_bytes", int, PACKED_BYTES)
    return size if info.get("packed") else None
