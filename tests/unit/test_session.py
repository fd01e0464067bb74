"""Which faults of a transfer end a session, and after which the engines that are left receive once more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.controller.sync import session as module
from instep.controller.sync.session import EngineGone, Session
from instep.controller.sync.weight_sync import WeightSync
from instep.engines import engine as engines
from instep.engines.engine import Engine, EngineRefusal
from instep.errors import EngineError, SyncError
from instep.weights.way import Sent
from instep_engine import BROKEN
from instep_engine.stream import StreamBroken

DYING_SECONDS = 4.0  # as long as a dying server of vLLM may answer
Update = Callable[["Scripted"], None]


class Scripted(Engine):
    """An engine whose control calls do what `updates` say, one entry for each session."""

    def __init__(self, name: str, *updates: Update):
        super().__init__(name, f"http://{name}")
        self.dead, self.updates, self.nonces, self.waited = False, list(updates), list[str](), 0.0
        options: Any = {"died_within": self.died_within, "describe": lambda: name, "remedy": lambda: "see its log"}
        self.process = SimpleNamespace(pid=1, **options)
        kind = SimpleNamespace(dying_seconds=DYING_SECONDS, num_workers=lambda engine, timeout: 1)
        self._kind = kind  # type: ignore[assignment]
        for call in ("pause", "reset_cache", "resume", "finish_update"):
            setattr(self, call, lambda *given, **options: None)

    def died_within(self, seconds: float) -> bool:
        self.waited += 0 if self.dead else seconds
        return self.dead

    def start_update(self, version: str, nonce: str, *, timeout: float) -> None:
        self.nonces.append(nonce)

    def update(self, info: dict[str, Any], *, timeout: float) -> None:
        if self.updates:
            self.updates.pop(0)(self)


def dies(engine: Scripted) -> None:
    engine.dead = True
    raise EngineError(f"{engine.name} did not answer")


def refuses(what: str, tensor: str | None, code: int) -> Update:
    def update(engine: Scripted) -> None:
        raise EngineRefusal(what, tensor=tensor, code=code)

    return update


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    def made(*engines: Scripted) -> Session:
        way = SimpleNamespace(drive=lambda carriage: carriage.deliver({}) or Sent((), "xxh3-128"))
        monkeypatch.setattr(module, "way_named", lambda name: way)
        settings = {"sync_timeout": 60.0, "offload_train": False, "offload_rollout": False, "weight_sync": "nccl"}
        args: Any = SimpleNamespace(
            pause_mode="abort", cluster="local", rollout_external_engine_addrs=None, run_dir="", **settings
        )
        actor: Any = SimpleNamespace()
        return Session(args, actor, engines, 1, Path("nowhere"))

    return made


@pytest.mark.parametrize("way", ["nccl", "lora", "lora_ipc", "lora_disk"])
def test_engines_go_on_while_an_adapter_arrives(transfer: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Its workers take the buckets between two steps: these seconds count as of the pause, too."""
    calls: list[str] = []
    engine = Scripted("one", lambda engine: time.sleep(0.2))
    for name in ("pause", "update", "finish_update", "reset_cache", "resume"):
        call = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *g, _n=name, _c=call, **o: calls.append(_n) or _c(*g, **o))
    session = transfer(engine)
    session.transfer(way)
    begun = ["pause", "update"] if way == "nccl" else ["update", "pause"]
    assert calls == [*begun, "finish_update", "reset_cache", "resume"]
    assert session.seconds["paused"] >= session.seconds["load"] >= 0.2


def test_an_adapter_that_is_refused_pauses_nobody(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, paused = Scripted("one", refuses("up is not finite", "up", 500)), list[str]()
    monkeypatch.setattr(engine, "pause", lambda mode, *, timeout: paused.append(mode))
    with pytest.raises(SyncError, match="not finite"):
        transfer(engine).transfer("lora_ipc")
    assert not paused


@pytest.mark.parametrize("dead_is_first", [True, False])
@pytest.mark.parametrize("tensor,code", [(None, 409), ("", 500)], ids=["embedded", "vllm"])
def test_a_death_that_breaks_the_stream_of_others_costs_a_retry(
    transfer: Any, dead_is_first: bool, tensor: str | None, code: int
) -> None:
    dead, left = Scripted("dead", dies), Scripted("left", refuses(f"{BROKEN}: a peer is gone", tensor, code))
    session = transfer(*((dead, left) if dead_is_first else (left, dead)))
    session.transfer("nccl")
    assert session.engines == [left] and len(set(left.nonces)) == 2 and len(dead.nonces) == 1
    assert not left.waited  # nobody waits for an engine that lives to die


def test_the_sender_may_see_the_death_of_an_engine_last(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others have their weights by then, and receive them once more."""
    dead, left = Scripted("dead", dies), Scripted("left")
    session, broken = transfer(dead, left), [StreamBroken("a peer is gone")]

    def drive(carriage: Any) -> Sent:
        carriage.deliver({})
        if broken:
            raise SyncError("the weights did not reach every engine") from broken.pop()
        return Sent((), "xxh3-128")

    monkeypatch.setattr(module, "way_named", lambda name: SimpleNamespace(drive=drive))
    session.transfer("nccl")
    assert session.engines == [left] and len(left.nonces) == 2


def test_each_death_costs_a_retry(transfer: Any) -> None:
    broken = refuses(f"{BROKEN}: a peer is gone", "", 500)
    first, second = Scripted("first", dies), Scripted("second", broken, dies)
    left = Scripted("left", broken, broken)
    session = transfer(first, second, left)
    session.transfer("nccl")
    assert session.engines == [left] and len(left.nonces) == 3


@pytest.mark.parametrize("when", ["receivers", "pause", "before load", "load"])
def test_who_waits_for_an_engine_that_has_died_before_hears_of_it(
    transfer: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """In whatever call it dies, and also between two calls: nobody asks it to load then."""
    ended = threading.Event()

    def waits(engine: Scripted) -> None:
        assert ended.wait(20), "nobody has ended the stream"
        raise EngineRefusal(f"{BROKEN}: it was ended", tensor="", code=500)

    dead, left = Scripted("dead", dies), Scripted("left", waits)
    session = transfer(dead, left)

    def drive(carriage: Any) -> Sent:
        carriage.receivers()
        if when == "receivers":
            dead.dead = True
        carriage.deliver({}, ended.set)
        return Sent((), "xxh3-128")

    if when == "pause":
        monkeypatch.setattr(dead, "pause", lambda *given, **options: dies(dead))
    elif when == "before load":
        monkeypatch.setattr(dead, "pause", lambda *given, **options: setattr(dead, "dead", True))
    monkeypatch.setattr(module, "way_named", lambda name: SimpleNamespace(drive=drive))
    session.transfer("nccl")
    assert session.engines == [left] and len(left.nonces) == 2 and len(dead.nonces) == 1


def test_a_fault_of_the_trainer_is_not_tried_again(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks may still be at work."""
    dead, left = Scripted("dead", dies), Scripted("left")
    session = transfer(dead, left)

    def drive(carriage: Any) -> Sent:
        carriage.deliver({})
        raise SyncError("a bucket does not fit into shared memory")

    monkeypatch.setattr(module, "way_named", lambda name: SimpleNamespace(drive=drive))
    with pytest.raises(SyncError, match="does not fit"):
        session.transfer("nccl")
    assert len(left.nonces) == 1


@pytest.mark.parametrize("what,tensor", [("up came twice", "up"), ("no checkpoint in /x", "")])
def test_what_an_engine_refuses_by_itself_ends_the_session(transfer: Any, what: str, tensor: str) -> None:
    one, dead = Scripted("one", refuses(what, tensor, 500)), Scripted("dead", dies)
    with pytest.raises(SyncError, match=what) as caught:
        transfer(one, dead).transfer("shm")
    assert len(one.nonces) == 1 and caught.value.remedy and not one.waited


def test_a_stream_that_has_broken_since_the_last_session_is_opened_once_more(transfer: Any) -> None:
    broken = refuses(f"{BROKEN}: more than 1 receivers have joined", "", 500)
    engine = Scripted("one", broken)
    transfer(engine).transfer("nccl")
    assert len(engine.nonces) == 2 and not engine.waited
    engine = Scripted("one", broken, broken, broken)
    with pytest.raises(SyncError, match="more than 1 receivers"):
        transfer(engine).transfer("nccl")
    assert len(engine.nonces) == 2 and engine.waited == DYING_SECONDS


def test_the_last_engine_that_dies_ends_the_run(transfer: Any) -> None:
    with pytest.raises(EngineGone, match="no engine is left in this sync"):
        transfer(Scripted("one", dies)).transfer("nccl")


def test_an_accusation_that_fails_says_why_it_did(tmp_path: Path) -> None:
    settings = {"sync_timeout": 60.0, "offload_train": False, "offload_rollout": True, "weight_sync": "shm"}
    settings |= {"vllm_overrides": {}, "sglang_overrides": {}}
    args: Any = SimpleNamespace(precision="fp32", sync_tolerance=None, **settings)
    sync, engine = WeightSync(args, SimpleNamespace(), "shm", tmp_path, vocab_size=50, max_len=9), Scripted("one")  # type: ignore[arg-type]
    engine.has_weights = False
    error = sync.accuse([engine], SyncError("a gap"), "rollout 3")
    assert "one dropped the weights when the trainer's turn began" in error.what
    assert error.remedy == "run once with --no-offload-rollout; resume from the last checkpoint"


def test_a_cache_that_is_not_dropped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    engine = Engine("one", "http://one")
    engine._kind = SimpleNamespace(reset_cache=lambda engine, *, timeout: answers.pop(0))  # type: ignore[assignment]
    engine.reset_cache(timeout=60)
    assert not answers
    monkeypatch.setattr(engines, "RESET_SECONDS", 0.2)
    answers += [False] * 100
    with pytest.raises(EngineRefusal, match="one keeps cached keys and values of old weights") as caught:
        engine.reset_cache(timeout=60)
    assert caught.value.is_deliberate
