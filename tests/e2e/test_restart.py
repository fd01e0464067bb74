"""The way `restart`: engines are ended and started anew on a checkpoint, under all their flags, and are proven."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.fleet import Fleet
from instep.controller.role import RoleTrainer
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.errors import ConfigError, EngineError
from instep.training import lr_schedule
from instep.weights.way import way_named
from tests.assets import make_checkpoint
from tests.e2e.commands import grpo_arguments, on_vllm, run, sync_folder, words_of
from tests.e2e.test_sync_proof import train_once

TOKENS = [40, 41, 42, 43, 44, 45, 46, 47, 30, 31, 32, 5, 6, 7]


@dataclass
class Stack:
    """One hf worker, and the fleet of one engine that began with stale weights."""

    args: Args
    actor: RoleTrainer
    fleet: Fleet
    said: list[str]
    flags: list[str]  # of the engine's next start

    @property
    def engine(self) -> Engine:
        return self.fleet.engines[0]

    def scores(self) -> list[float]:
        return self.engine.prompt_log_probs(TOKENS, timeout=60)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def stack(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    kind = on_vllm() if request.param == "vllm" else ["--rollout-backend", "embedded"]
    words = ["--weight-sync", "restart", "--vllm-max-num-seqs", "7", *kind, "--engine-start-timeout", "300"]
    model = make_checkpoint(folder / "hf", head_dim=32)
    args = parse(grpo_arguments(tiny, folder, "--hf-checkpoint", str(model), *words)[1:], "train")
    args = args.replace(device="cpu", precision="fp32", rollout_backend=request.param)
    spec = plan_engines(args.replace(hf_checkpoint=str(make_checkpoint(folder / "stale", seed=7, head_dim=32))))[0]
    workers = WorkerGroup("actor", 1, folder / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    engine = start_engine(args, spec, num_threads=1, log_dir=folder / "logs")

    def start_anew(index: int, checkpoint: Path | None = None) -> None:
        changed = replace(spec, words={**spec.words, "more": stack.flags}).on(checkpoint)
        options = {"num_threads": 1, "log_dir": folder / "logs", "port": urlsplit(engine.url).port}
        engine.process = start_engine(args, changed, **options).process

    said: list[str] = []
    fleet = Fleet(args, [engine], restart=start_anew, log_dir=folder / "logs", status=said.append)
    try:
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), 1, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(model)
        fleet.wait_ready(300)
        fleet.admit([engine])
        stack = Stack(args, actor, fleet, said, [])
        yield stack
    finally:
        workers.close()
        fleet.close()
        engine.stop()
        way_named("restart").close()  # type: ignore[attr-defined]


@pytest.fixture
def sync(stack: Stack) -> Iterator[WeightSync]:
    yield (made := synced(stack, stack.args))
    made.close()


def synced(stack: Stack, args: Args) -> WeightSync:
    options = {"vocab_size": 50, "max_len": 128, "start_on": stack.fleet.start_on}
    return WeightSync(args, stack.actor, "restart", sync_folder(args), **options)


def test_an_engine_scores_as_by_disk_and_the_fleet_takes_it_for_no_death(stack: Stack, sync: WeightSync) -> None:
    engine, pids, homes = stack.engine, [], []
    train_once(stack.actor.workers, 1e-3)
    sync.run([engine], "disk")
    by_disk = stack.scores()
    for _ in range(2):
        result = sync.run([engine])
        stack.fleet.synced([engine], result.engines)
        stack.fleet.check()
        assert stack.scores() == by_disk and result.proven.last.largest <= 1e-5 and result.num_bytes > 300_000
        assert engine.process is not None
        words = words_of(psutil.Process(engine.process.pid))
        pids.append(engine.process.pid)
        homes.append(Path(next(word for word in words if "instep-golden-" in word)))
        assert words[words.index("--max-num-seqs") + 1] == "7"  # the flags are those of before
        (model,) = get_json(engine.url + "/v1/models", 10.0)["data"]
        assert Path(model["id"]).name == "stale"  # what requests call it is what they called it
    assert len(set(pids)) == 2 and not homes[0].exists() and homes[1].is_dir()
    assert not stack.fleet.waiting() and stack.fleet.available() == [engine] and not stack.said
    time.sleep(2.5)  # as long as three looks at the health of an engine take
    assert stack.fleet.available() == [engine] and not stack.said


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["embedded"], indirect=True)
def test_an_engine_that_does_not_come_up_ends_the_run_with_its_log(stack: Stack) -> None:
    """It ends before it is ready, or is not ready within the bound."""
    for flags, bound, what in (
        (["--no-such-flag"], 300.0, "engine 0 ended before it was ready"),
        ([], 0.01, "engine 0 was not ready after 0 s"),
    ):
        stack.flags[:] = flags
        with pytest.raises(EngineError, match=what) as error:
            synced(stack, stack.args.replace(engine_start_timeout=bound)).run([stack.engine])
        assert "embedded engine: ready at" in error.value.where and error.value.remedy  # the end of its log
        assert "unrecognized arguments: --no-such-flag" in error.value.where or not flags
        stack.flags[:] = []
        stack.fleet.start_on([stack.engine], Path(stack.args.hf_checkpoint))  # as if it had not happened
        stack.engine.wait_ready(240)
    assert synced(stack, stack.args).run([stack.engine]).proven.last.largest <= 1e-5


@pytest.mark.parametrize(
    "flags,what",
    [
        (["--rollout-external-engine-addrs", "127.0.0.1:1"], "this run cannot restart engines that it did not start"),
        (["--pause-mode", "keep"], "keeps no responses"),
    ],
)
def test_what_cannot_be_started_anew_is_refused(tiny: Path, tmp_path: Path, flags: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse(grpo_arguments(tiny, tmp_path, "--weight-sync", "restart", *flags)[1:], "train")
    assert caught.value.remedy


@pytest.mark.slow
def test_a_run_is_the_same_as_by_disk(tiny: Path, tmp_path: Path) -> None:
    rows = []
    for way in ("restart", "disk"):
        words = ["--rm-type", "random", "--deterministic-mode", "--rollout-backend", "embedded", "--weight-sync", way]
        done = run(grpo_arguments(tiny, tmp_path / way, *words, "--num-rollout", "2"))
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        rows.append([row for row in map(json.loads, lines) if "train/loss" in row])
    names = ("train/loss", "train/grad_norm", "sync/bytes", "sync/version")
    assert [[row[n] for n in names] for row in rows[0]] == [[row[n] for n in names] for row in rows[1]]
    assert len(rows[0]) == 2 and rows[0][0]["train/grad_norm"] > 0
