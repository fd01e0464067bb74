"""A run over two nodes of a Ray cluster: a node, or a process there, dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e import commands
from tests.e2e.commands import gone_within, words_of
from tests.e2e.conftest import LOOPBACK
from tests.faults.harness import ENDLESS, Place, Run
from tests.faults.registry import scenario

NODES = Path(commands.__file__).with_name("ray_nodes.py")


@contextmanager
def nodes(num: int) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a Ray with `num` nodes on this host, and the process above all of theirs."""
    command, env = [sys.executable, str(NODES), str(num), "8", "8"], {**commands.ENVIRONMENT, **LOOPBACK}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        ours = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        process.wait(60)
    assert gone_within(ours, 10)


def engine_of(above: psutil.Process) -> psutil.Process:
    return next(p for p in above.children(recursive=True) if "instep.engines.embedded" in words_of(p))


def over_two(place: Place, address: str, name: str) -> Run:
    """The trainer on one node, the engine on the other."""
    flags = ("--weight-sync", "disk", "--num-gpus-per-node", "1", "--cluster", "ray", "--ray-address", address)
    return place.run(*ENDLESS, *flags, env=LOOPBACK, name=name)


@scenario(
    slow=True,
    ray_engine_killed="error: on Ray, an engine on another node is killed (SIGKILL)",
    ray_node_killed="error: on Ray, the node of an engine dies, its raylet by SIGKILL (noticed within 60 s)",
)
def ray_nodes(place: Place) -> None:
    with nodes(2) as (address, above):
        with over_two(place, address, "engine") as run:
            run.wait_steps()
            victim = engine_of(above)
            run.mark()
            victim.send_signal(signal.SIGKILL)
            run.error("ray_engine_killed", "EngineError: engine 0 died (SIGKILL)")
        with over_two(place, address, "node") as run:
            run.wait_steps()
            raylet = next(p for p in engine_of(above).parents() if p.name() == "raylet")
            run.mark()
            raylet.kill()
            run.error("ray_node_killed", "Error: ", "node", within=60)
