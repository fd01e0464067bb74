"""The lease of an engine's pause: on the engine's side, in the plugin around vLLM's methods, and in the controller."""

import asyncio
import importlib
import importlib.util
import sys
import time
from types import SimpleNamespace

import pytest

import instep.engines.held_lease as held
import instep_engine.lease
from instep.engines.engine import Engine, EngineRefusal
from instep.errors import EngineError
from instep_engine.lease import EXPIRED, HELD, UNKNOWN, Lease, NoLease


def asking(begin=False, owner="a", seconds=0.1, **more):
    return {"owner": owner, "seconds": seconds, "begin": begin, **more}


class Server:
    """A lease and what it has told."""

    def __init__(self):
        self.told = []
        self.lease = Lease(self.expired)

    async def expired(self, in_place):
        self.told.append(in_place)


def served(work):
    """Run `work(server)` in an event loop; returns what the lease has told."""

    async def run():
        server = Server()
        await work(server)
        return server.told

    return asyncio.run(run())


def test_a_lease_that_is_renewed_lasts_and_one_that_is_not_expires_once():
    async def work(server):
        server.lease.ask(asking(begin=True, seconds=1.0))
        for seconds in (1.0, 1.0, 0.1):
            await asyncio.sleep(0.4)
            server.lease.ask(asking(seconds=seconds))
        assert server.told == []
        while not server.told:
            await asyncio.sleep(0.05)
        with pytest.raises(NoLease, match=EXPIRED):
            server.lease.check()
        with pytest.raises(NoLease, match=EXPIRED):
            server.lease.ask(asking())

    assert served(work) == [False]


def test_a_late_renewal_after_the_resume_begins_nothing():
    async def work(server):
        server.lease.ask(asking(begin=True))
        server.lease.end()
        with pytest.raises(NoLease, match=UNKNOWN):
            server.lease.ask(asking())
        await asyncio.sleep(0.25)
        server.lease.check()

    assert served(work) == []


def test_the_next_run_begins_after_an_expiry_and_only_then():
    async def work(server):
        server.lease.ask(asking(begin=True))
        for begin in (True, False):
            with pytest.raises(NoLease, match=f"{HELD}: a"):
                server.lease.ask(asking(begin, owner="b"))
        while not server.told:
            await asyncio.sleep(0.05)
        server.lease.ask(asking(begin=True, owner="b"))
        server.lease.check()
        with pytest.raises(NoLease, match=f"{HELD}: b"):
            server.lease.ask(asking(owner="a"))  # it stood still meanwhile

    assert served(work) == [False]


@pytest.mark.parametrize("done", [None, "whole", "end"])
def test_what_was_written_in_place_is_told_until_a_session_is_whole(done):
    async def work(server):
        server.lease.ask(asking(begin=True))
        server.lease.ask(asking(in_place=True))
        server.lease.ask(asking())  # a renewal takes nothing back
        if done is not None:
            getattr(server.lease, done)()
        if done == "end":
            server.lease.ask(asking(begin=True))
        while not server.told:
            await asyncio.sleep(0.05)

    assert served(work) == [done is None]


@pytest.mark.parametrize("given", [None, [], {}, {"owner": "a"}, asking(seconds=0.0), asking(seconds=float("inf"))])
def test_a_malformed_request_begins_nothing(given):
    async def work(server):
        with pytest.raises(NoLease, match="a lease has an owner"):
            server.lease.ask(given)
        assert server.lease._timer is None

    served(work)


# ---- around vLLM's methods ---------------------------------------------------------------------------------------


@pytest.fixture
def async_llm(monkeypatch):
    """The plugin's module, where vLLM is not installed."""
    monkeypatch.setattr("instep_engine.vllm.fast.versions.minor_version", lambda: 26)
    return importlib.reload(importlib.import_module("instep_engine.vllm.async_llm"))


def make_llm(replicas=1, scheduler="instep_engine.vllm.fast.scheduler.make"):
    """A class with the methods of vLLM's that are wrapped, which notes what reaches them."""

    class Llm:
        def __init__(self):
            self.did, self.told = [], []
            self.engine_core = SimpleNamespace(call_utility_async=self.note)
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=replicas),
                scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
            )

        async def note(self, method, version):
            assert method == "instep_set_version"
            self.told.append(version)

        async def init_weight_transfer_engine(self, request):
            self.did.append("init")

        async def update_weights(self, request):
            if request.update_info.get("refused"):
                raise RuntimeError(request.update_info["refused"])
            self.did.append(request.update_info["backend"])

        async def finish_weight_update(self, weight_version=None):
            self.did.append("finish")

        async def resume_generation(self):
            self.did.append("resume")

    return Llm


class Trainer:
    """Calls to such a server, as instep makes them."""

    def __init__(self, llm):
        self.llm = llm

    async def lease(self, **about):
        await self.llm.init_weight_transfer_engine(SimpleNamespace(init_info={"lease": asking(**about)}))

    async def init(self, version="3"):
        await self.llm.init_weight_transfer_engine(SimpleNamespace(init_info={"protocol": 1, "version": version}))

    async def update(self, backend="shm", **info):
        await self.llm.update_weights(SimpleNamespace(update_info={"backend": backend, **info}))


async def begun(async_llm, **options):
    llm_class = make_llm(**options)

    async def end():
        llm.did.append("end")

    async_llm.install(llm_class, end)
    async_llm.install(llm_class, end)  # plugins may be loaded twice
    llm = llm_class()
    trainer = Trainer(llm)
    await trainer.lease(begin=True)
    await trainer.init()
    return llm, trainer


def what_an_expiry_does(async_llm, steps, **options):
    async def run():
        llm, trainer = await begun(async_llm, **options)
        for step in steps:
            await step(llm, trainer)
        done = len(llm.did)
        while len(llm.did) == done:
            await asyncio.sleep(0.05)
        return llm.did[done:]

    return asyncio.run(run())


async def bucket(llm, trainer):
    await trainer.update()


def of_adapter(way):
    async def step(llm, trainer):
        await trainer.update(way)

    return step


async def complete(llm, trainer):
    await trainer.update("complete")


async def finish(llm, trainer):
    await llm.finish_weight_update("3")


async def in_place(llm, trainer):
    await trainer.lease(in_place=True)


def refused(message):
    async def step(llm, trainer):
        with pytest.raises(RuntimeError, match="the digest"):
            await trainer.update(refused=message)

    return step


TORN = "WeightMismatch[w]: the digest of w differs"
LOADED = "; some weights of the session were loaded before"


@pytest.mark.parametrize(
    "steps, does",
    [
        ([], "resume"),
        ([bucket], "end"),
        ([of_adapter("lora")], "resume"),  # which is not in use before the session is complete
        ([of_adapter("lora_ipc"), of_adapter("lora_ipc")], "resume"),
        ([of_adapter("lora_disk"), complete], "end"),
        ([of_adapter("memory")], "resume"),  # the nonce of its memory is compared, and nothing is loaded
        ([bucket, of_adapter("lora")], "end"),
        ([bucket, complete, finish], "resume"),
        ([bucket, finish], "end"),  # so a session is given up that another trainer has left
        ([refused(TORN)], "resume"),  # the first bucket: nothing was loaded
        ([refused(TORN + LOADED)], "end"),  # in the middle of a stream, or another worker has loaded its part
        ([bucket, refused(TORN)], "end"),
        ([in_place], "end"),
        ([in_place, complete, finish], "resume"),
        ([in_place, finish], "end"),
    ],
)
def test_an_engine_goes_on_with_one_version_alone(async_llm, steps, does):
    assert what_an_expiry_does(async_llm, steps) == [does]


def test_replicas_of_which_one_has_refused_end(async_llm):
    assert what_an_expiry_does(async_llm, [refused(TORN)], replicas=2) == ["end"]
    assert instep_engine.lease.LOADED == LOADED


def test_after_an_expiry_the_old_session_is_refused_and_a_new_one_is_not(async_llm):
    async def run():
        llm, trainer = await begun(async_llm)
        while "resume" not in llm.did:
            await asyncio.sleep(0.05)
        for call in (trainer.init, trainer.update, trainer.lease, llm.finish_weight_update):
            with pytest.raises(RuntimeError, match=r"WeightMismatch\[\]: no request renewed the lease"):
                await call()
        await trainer.lease(begin=True, owner="b", seconds=60.0)
        for step in (trainer.init, trainer.update):
            await step()
        await complete(llm, trainer)
        await llm.finish_weight_update()
        await llm.resume_generation()
        with pytest.raises(RuntimeError, match=UNKNOWN):
            await trainer.lease(owner="b")  # on its way when the engine resumed
        return llm.did

    assert asyncio.run(run()) == ["init", "resume", "init", "shm", "complete", "finish", "resume"]


@pytest.mark.parametrize("change", ["gone", "not async"])
def test_no_lease_is_kept_by_a_vllm_that_is_not_known(async_llm, caplog, change):
    llm_class = make_llm()
    if change == "gone":
        del llm_class.resume_generation
    else:
        llm_class.finish_weight_update = lambda self: None
    before = dict(vars(llm_class))
    async_llm.install(llm_class)
    assert vars(llm_class) == before and caplog.text.count("no lease of pauses, because this vLLM's AsyncLLM.") == 1


# ---- in the controller -------------------------------------------------------------------------------------------


class Kind:
    """A kind of engine whose lease is kept in this process."""

    def lease(self, about):
        return "/lease", about


def test_the_thread_that_renews_ends_with_the_pause(monkeypatch):
    monkeypatch.setattr(held, "RENEW_SECONDS", 0.05)
    engine = Engine("engine 0", "http://127.0.0.1:1", None, Kind())
    asked, threads = [], []

    def post(path, body, timeout, *more):
        asked.append(body)
        time.sleep(0.1)  # a renewal is under way when the next pause begins

    monkeypatch.setattr(engine, "_post", post)
    for _ in range(3):
        engine.lease.take(5.0)
        threads.append(engine.lease._ended)
        engine.lease.take(5.0, in_place=True)
        time.sleep(0.1)
        engine.lease.end()
    assert all(ended.is_set() for ended in threads) and len(set(map(id, threads))) == 3
    assert [body["begin"] for body in asked].count(True) == 3 == [body["in_place"] for body in asked].count(True)
    assert len({body["owner"] for body in asked}) == 1
    deadline = time.monotonic() + 10
    while any(t.name == "lease of engine 0" for t in held.threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(t.name == "lease of engine 0" for t in held.threading.enumerate())


def test_a_process_that_stood_still_asks_before_it_goes_on(monkeypatch):
    engine = Engine("engine 0", "http://127.0.0.1:1", None, Kind())
    asked = []
    monkeypatch.setattr(engine, "_post", lambda path, body, *more: asked.append(body))
    engine.lease.take(5.0)
    engine.lease.check(5.0)
    assert len(asked) == 1
    engine.lease._renewed -= held.LEASE_SECONDS
    engine.lease.check(5.0)
    assert [body["begin"] for body in asked] == [True, False]
    engine.begin_anew()  # the engine was away
    engine.lease.take(5.0)
    engine.lease.end()
    assert asked[-1]["begin"]


@pytest.mark.parametrize(
    "said, remedy",
    [
        (f"{EXPIRED}", "resume it from its last checkpoint"),
        (f"{HELD}: process 7 on host1 (5f3a)", "end that run"),
        (UNKNOWN, "another process resumed or restarted the engine"),
        ("the session is malformed: Session() got an unexpected keyword argument 'lease'", "the plugin of this"),
    ],
)
def test_a_lease_that_is_refused_says_what_to_do(monkeypatch, said, remedy):
    monkeypatch.setattr(held, "LEASE_SECONDS", 0.1)  # so long another run is waited for, twice
    monkeypatch.setattr(held, "RENEW_SECONDS", 0.05)
    engine, asked = Engine("engine 0", "http://127.0.0.1:1", None, Kind()), []

    def post(path, body, *more):
        asked.append(body)
        raise EngineRefusal(f"engine 0 refused {path} with 500: {said}", where=engine.url)

    monkeypatch.setattr(engine, "_post", post)
    with pytest.raises(EngineError, match="engine 0 refused /lease") as caught:
        engine.start_update("1", "nonce", timeout=5.0)
    assert remedy in caught.value.remedy and caught.value.where == engine.url and (len(asked) > 1) == (HELD in said)
    assert engine.lease._ended is None  # no thread


# ---- which version a session has brought -----------------------------------------------------------------------------


def versions_told(async_llm, sessions, **options):
    """What the engine core hears in sessions with these versions, each with its updates."""

    async def run():
        llm, trainer = await begun(async_llm, **options)
        for version, updates in sessions:
            await trainer.init(version)
            for backend in updates:
                await trainer.update(backend)
            await llm.finish_weight_update()
        llm._instep_keeper.lease.end()
        return llm.told

    return asyncio.run(run())


def test_the_core_hears_which_version_a_session_has_brought(async_llm):
    assert versions_told(async_llm, [("3", ["shm", "complete"]), ("4", ["lora", "complete"])]) == ["3", "4"]


@pytest.mark.parametrize("given_up", [[], ["shm"], ["complete", "shm"]])
def test_a_session_that_was_given_up_has_brought_nothing(async_llm, given_up):
    """The engine computes as before it, or nobody knows with what: it is still of the last session."""
    assert versions_told(async_llm, [("3", ["shm", "complete"]), ("4", given_up)]) == ["3"]


@pytest.mark.parametrize(
    "scheduler", [None, "vllm.Scheduler", "instep_engine.vllm.fast.scheduler.FastScheduler", object]
)
def test_a_core_without_the_scheduler_that_listens_is_told_nothing(async_llm, scheduler):
    assert versions_told(async_llm, [("3", ["shm", "complete"])], scheduler=scheduler) == []


def test_a_vllm_that_tells_versions_itself_is_told_nothing(async_llm, monkeypatch):
    monkeypatch.setattr(sys.modules["instep_engine.vllm.fast.versions"], "minor_version", lambda: 32)
    assert versions_told(async_llm, [("3", ["shm", "complete"])]) == []
