"""Weight updates by trainers that are not ours: who has the weight group, what has come, and how engines get it.

One thread does what waits: it joins the group, receives, and brings a whole version to the engines by a session
(`controller/sync/session.py`), so that these never run at the same time. Requests for a text are held back, and have
ended, while a version is brought to the engines (`rollout/admission.py`); what is merely received holds back nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from instep.cluster.local import WorkerGroup
from instep.errors import EngineError, InstepError, SyncError, WorkerError
from instep.rollout import admission
from instep.system.gpus import visible_gpus
from instep_neighbours.trl.clients import BadRequest, Client, Connection, Refused
from instep_neighbours.trl.delivery import Delivery
from instep_neighbours.trl.receiver import Announced, Meeting, WrongTensor
from instep_neighbours.trl.staging import Incoming, Layout, packed_bytes_of

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.controller.fleet import Fleet

T = TypeVar("T")
JOIN_SECONDS = 300.0  # vLLM's own bound for the store
ALIVE_SECONDS = 5.0
CLOSING_SECONDS = 0.2
RECEIVER = "instep_neighbours.trl.receiver"


class Updates:
    """All weight updates of one server. Methods without an underscore belong to the thread of the event loop.

    Args:
        args: of `instep serve`, with `sync_timeout`.
        layout: of the checkpoint that is served.
        folder: in shared memory, for staged weights.
        host: where the store of a group listens that this server masters.
        say: tells the user.
    """

    def __init__(
        self, args: Args, fleet: Fleet, layout: Layout, folder: Path, logs: Path, host: str, say: Callable[[str], None]
    ):
        self._args, self._fleet, self._layout, self._logs = args, fleet, layout, logs
        self._host, self._say = host, say
        self.delivery = Delivery(args, fleet, layout, folder)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._group: WorkerGroup | None = None
        self._client: Client | None = None
        self._incoming: Incoming | None = None
        self._last: Client | None = None  # the one that had it last, if its update has failed
        self._paused: float | None = None  # by a client: since when, and who had the group then
        self._pauser: Client | None = None
        self._no_pause_before = 0.0
        self._num_waiting = 0  # for the thread: jobs of clients

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            self._group.close(0.5)
        admission.reset()

    # ---- the group ---------------------------------------------------------------------------------------------------

    async def init_legacy(self, connection: Connection, port: int, world_size: int, device_uuid: str) -> None:
        """Let the trainer of TRL <= 1.10 join, as rank 1 of a store of ours; returns at once. Raises Refused."""
        if world_size != 2:
            raise Refused(f"world_size is {world_size}: this server is one rank, so that it is 2 (/get_world_size/)")
        gpus = visible_gpus()[: self._args.rollout_num_gpus] if self._args.device == "cuda" and device_uuid else ()
        if any(device_uuid in gpu.uuid for gpu in gpus):
            raise Refused(
                f"the trainer's GPU {device_uuid} is one of the server's: give each GPUs of its own with "
                "CUDA_VISIBLE_DEVICES"
            )
        client = await self._admit(connection, legacy=True)
        meeting = Meeting(self._host, port, 0, self._args.device, JOIN_SECONDS)
        self._begin(client, lambda: self._join(client, meeting))

    async def init(self, connection: Connection, info: dict[str, Any]) -> None:
        """Join the group of the trainer of TRL >= 1.11, which is rank 0. Raises Refused."""
        host, port = info.get("master_address"), info.get("master_port")
        if not isinstance(host, str) or type(port) is not int:
            raise BadRequest("init_info needs master_address and master_port")
        if (size := info.get("world_size")) != 2 or info.get("rank_offset") != 1:
            raise Refused(f"world_size is {size}: this server is one rank, 1 of 2 (/get_world_size answers 1)")
        packed_bytes = packed_bytes_of(info)
        client = await self._admit(connection, legacy=False)
        client.packed_bytes = packed_bytes
        await self._do(client, lambda: self._join(client, Meeting(host, port, 1, self._args.device, JOIN_SECONDS)))

    async def leave(self, connection: Connection) -> None:
        """Let the trainer go. What it had begun to send is dropped, what it has sent is brought to the engines."""
        client = self._client
        if client is not None and client.has(connection):
            if self._incoming is None:
                await self._settled()
            self._drop(client)

    @property
    def takes_none(self) -> str:
        """Why no weights are taken from anybody; "" if they are."""
        return self._layout.refusal

    async def check_free(self, connection: Connection) -> None:
        """Raise Refused if whoever asks by this connection would not get the weight group now.

        The trainer of TRL >= 1.11 has to hear of it before it inits the group: then it waits for NCCL without a bound,
        and would not look at the answer.
        """
        if self.takes_none:
            raise Refused(self.takes_none)
        holder = self._client
        if holder is None or connection in holder.connections:
            return
        if await self._holds(holder):
            told = (
                f"the trainer at {holder.peer} has the weight group since {holder.since}; one trainer at a time sends "
                "weights: end it (or let it close its communicator), and try again"
            )
            self._say(f"the trainer at {connection.peer} was refused: {told}")
            raise Refused(told)
        if self._client is holder:
            self._drop(holder)

    async def _admit(self, connection: Connection, legacy: bool) -> Client:
        await self.check_free(connection)
        if self._client is not None and connection in self._client.connections:
            self._drop(self._client)
        if self._client is not None:
            raise Refused(f"the trainer at {self._client.peer} was first: it has the weight group now")
        self._client, self._incoming, self._last = Client(legacy, [connection]), None, None
        return self._client

    async def _holds(self, client: Client) -> bool:
        """Whether it still has the group: a connection of it is open or, where it masters the store, that answers."""
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

    def _holder(self, connection: Connection, legacy: bool) -> Client:
        """The client that has the group, which a request to change weights must be from. Raises Refused."""
        self._tell_fault(connection)
        route = "/init_communicator/" if legacy else "/init_weight_transfer_engine"
        if self._client is None or self._client.legacy != legacy:
            raise Refused(f"there is no weight group with you: POST {route} first")
        self._client.seen(connection)
        return self._client

    def _tell_fault(self, connection: Connection) -> None:
        """Raise Refused with the fault of a client that has not heard of it yet."""
        last = self._last
        if last is not None and last.fault and last.has(connection):
            fault, last.fault = last.fault, ""
            raise Refused(fault)

    async def _settled(self) -> None:
        """Wait until the thread has done all that it was given."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    # ---- an update ---------------------------------------------------------------------------------------------------

    def start(self, connection: Connection) -> None:
        """Begin an update (TRL >= 1.11); one that was not finished is dropped. Raises Refused."""
        self._holder(connection, legacy=False)
        self._incoming = Incoming(self._layout)

    def announce(self, connection: Connection, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one tensor (TRL <= 1.10); the last one ends the update. Returns at once. Raises Refused."""
        client = self._holder(connection, legacy=True)
        incoming = self._incoming or Incoming(self._layout)
        try:
            what = incoming.announce(name, dtype, tuple(shape))
        except WrongTensor as error:
            self._incoming = None
            raise Refused(f"{error}; this update is dropped, and the engines keep their weights") from error
        self._incoming = incoming
        self._begin(client, lambda: self._receive(client, incoming, [what], None))
        if not incoming.missing:
            self._incoming = None
            admission.close()  # who asks for a text from now on gets it from the new weights
            self._begin(client, lambda: self._bring(client, incoming))

    async def update(self, connection: Connection, info: dict[str, Any]) -> None:
        """Receive tensors (TRL >= 1.11). Raises Refused."""
        client = self._holder(connection, legacy=False)
        if self._incoming is None:
            raise Refused("no update was started: POST /start_weight_update first")
        incoming, lists = self._incoming, [info.get(key) for key in ("names", "dtype_names", "shapes")]
        if not all(isinstance(each, list) and len(each) == len(lists[0] or ()) for each in lists):
            raise BadRequest("update_info needs names, dtype_names and shapes, of one length")
        packed_bytes = packed_bytes_of(info) if "packed" in info else client.packed_bytes
        what, wrong = incoming.announce_all(zip(*cast(list[list[Any]], lists), strict=True))
        # The trainer is broadcasting already: it gets rid of all that it has announced before it hears of a mistake.
        await self._do(client, lambda: self._receive(client, incoming, what, packed_bytes))
        if wrong:
            self._incoming = None
            raise Refused(f"{wrong}; this update is dropped, and the engines keep their weights")

    async def finish(self, connection: Connection) -> None:
        """Bring what has come to the engines (TRL >= 1.11). Raises Refused."""
        client = self._holder(connection, legacy=False)
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            raise Refused("no update was started: POST /start_weight_update first")
        incoming.check_whole()
        admission.close()
        await self._do(client, lambda: self._bring(client, incoming))

    async def reset(self, connection: Connection) -> bool:
        """Wait for the update of a legacy client, and let the engines forget what they have cached.

        Returns:
            Whether all engines did; one that computes keeps its cache.

        Raises:
            Refused: the update has failed, or is not whole.
        """
        client = self._client
        if client is not None and client.legacy and client.has(connection):
            await self._settled()
            if self._client is client and self._incoming is not None and self._incoming.begun:
                incoming, self._incoming = self._incoming, None
                incoming.check_whole()
        self._tell_fault(connection)
        try:
            return await asyncio.to_thread(self._reset_caches)
        except EngineError as error:
            raise Refused(_told(error), 503) from error

    def _reset_caches(self) -> bool:
        kept: list[bool] = []
        self.delivery.each(lambda e: kept.append(e.kind.reset_cache(e, timeout=self._args.sync_timeout) is False))
        return not any(kept)

    # ---- pauses ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Let the engines generate nothing until `resume`, while the trainer lives, for `--sync-timeout` at most.

        Asking again makes it no longer; after a pause that nobody has ended the engines go on for as long."""
        holder, now = self._client, time.monotonic()
        pauser = holder if holder is not None and await self._holds(holder) else None
        if pauser is None and (left := self._no_pause_before - now) > 0:
            raise Refused(f"nobody has ended the last pause: the next one may begin in {left:.0f} s", 409)
        if self._paused is None:
            self._paused, self._pauser = now, pauser
        self.delivery.paused = True
        await self._run(lambda: self.delivery.each(lambda e: e.pause(mode, timeout=self._args.sync_timeout)))

    async def resume(self) -> None:
        """Let the engines go on. Raises Refused, also if the version that came meanwhile cannot be proven."""
        try:
            await self._run(self.delivery.resume)
        except Refused as error:
            if not self.delivery.paused:
                self._say(f"weights that came while the engines were paused: {error}")
            raise
        finally:
            if not self.delivery.paused:
                self._paused = self._pauser = None

    async def look(self) -> None:
        """Called repeatedly: ends a pause that nobody ends, and brings the weights to engines that came back."""
        if self._paused is not None:
            if why := await self._why_resume(self._paused, pauser := self._pauser):
                await self.resume()
                self._no_pause_before = 0.0 if pauser else time.monotonic() + self._args.sync_timeout
                self._say(f"{why}: the engines go on")
        for engine in self._fleet.waiting():
            await self._run(partial(self.delivery.rejoin, engine))

    async def _why_resume(self, since: float, pauser: Client | None) -> str:
        """Why a pause is over that nobody has ended; "": it is not."""
        if pauser is not None and (self._client is not pauser or not await self._holds(pauser)):
            if self._client is pauser:
                self._drop(pauser)
            return f"the trainer at {pauser.peer}, which has paused the engines, has the weight group no more"
        bound = self._args.sync_timeout
        return f"nobody has resumed the engines for {bound:.0f} s" if time.monotonic() - since > bound else ""

    # ---- in the thread -----------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except (EngineError, SyncError) as error:
            raise Refused(_told(error), 503) from error

    async def _do(self, client: Client, work: Callable[[], None]) -> None:
        """Do a part of the client's update, and wait for it. Raises Refused."""
        outcome = self._begin(client, work)
        try:
            await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            client.given_up = True  # its request has ended, and it with it
            raise
        if client.failed:
            fault, client.fault = client.fault, ""
            raise Refused(fault)

    def _begin(self, client: Client, work: Callable[[], None]) -> Future[None]:
        def guarded() -> None:
            try:
                if not (client.failed or client.given_up):
                    work()
            except (InstepError, OSError) as error:
                self._fail(client, error)
            finally:
                self._num_waiting -= 1
                if client.failed or client.given_up:
                    admission.open_again()

        self._num_waiting += 1
        return self._thread.submit(guarded)

    def _fail(self, client: Client, error: Exception) -> None:
        told = _told(error)
        self._say(f"weights from {client.peer}: {told}")
        client.failed, client.fault, self._last = True, f"{told}; then init the weight group again", client
        if self._client is client:
            self._client = self._incoming = None
        self._end_group()

    def _is_joined(self) -> bool:
        if self._group is None:
            return False
        self._group.watch = self._group.check_alive  # a trainer without an open connection may live
        try:
            return bool(self._group.call("alive", timeout=ALIVE_SECONDS)[0])
        except WorkerError:
            return False

    def _end_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close(0.5)

    def _join(self, client: Client, meeting: Meeting) -> None:
        self._end_group()
        env = {"OMP_NUM_THREADS": "1"}
        self._group = WorkerGroup("receiver", 1, self._logs, env, self._args.heartbeat_timeout, RECEIVER)
        self._call(client, "join", meeting, seconds=meeting.seconds)
        self._say(f"the trainer at {client.peer} has the weight group")

    def _receive(self, client: Client, incoming: Incoming, what: list[Announced], packed_bytes: int | None) -> None:
        if incoming.slot is None:
            incoming.slot = self.delivery.free_slot()
        what = [incoming.slot.placed(one) for one in what]
        found = self._call(client, "receive", what, packed_bytes, client.legacy, seconds=self._args.sync_timeout)
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


def _told(error: Exception) -> str:
    if not isinstance(error, InstepError):
        return str(error)
    where, remedy = f" ({error.where})" if error.where else "", f"; {error.remedy}" if error.remedy else ""
    return f"{error.what}{where}{remedy}"
