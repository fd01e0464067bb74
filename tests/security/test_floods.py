"""1,100 connections of another user end no group of a run; groups that are made later form as ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.flood import flooded

ROOT = Path(__file__).parents[2]


class Member:
    def __init__(self, rank: int, file: Path, how: str):
        words = [sys.executable, "-m", "tests.security.gloo_member", str(rank), str(file), how]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which `hear` tells

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.mark.parametrize("how", ["guarded", "bare"])
def test_a_group_of_gloo(how: str, tmp_path: Path) -> None:
    """Without the guard the process aborts: if a later torch takes no notice, the guard has done its work."""
    members = [Member(rank, tmp_path / "store", how) for rank in range(2)]
    try:
        ports = json.loads(members[0].hear())
        json.loads(members[1].hear())
        assert len(ports) == 1
        with flooded(ports[0], 1100 if how == "bare" else 3) as held:
            assert held == (0 if how == "guarded" else 1100), held
            for word in ("go on", "new", "go on") if how == "guarded" else ():
                for member in members:
                    member.say(word)
                for member in members:
                    total, num_open = map(int, member.hear().split())
                    assert total == 8 and num_open < 200
            if how == "bare":
                assert members[0].process.wait(300) == -6
    finally:
        for member in members:
            member.process.kill()
            member.process.communicate()


def test_the_store_of_trls_weight_group() -> None:
    """It goes on while its descriptors are used up, and takes no connection once both members are there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "tests.security.store_of_trl", str(port)]
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            for answer, num in ((b"1", 1100), (b"2", 0)):
                with flooded(port) as held:
                    assert held == num
                    process.stdin.write("\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == f"{answer!r}\n"
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["the command line", "a child"])
def test_processes_may_have_many_descriptors(how: str) -> None:
    code = "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
    if how == "a child":
        code += "from instep.system.processes import follow_parent\nfollow_parent()\n"
    else:
        code += "from instep.cli import main\nmain(['--version'])\n"
    code += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    soft, hard = map(int, done.stdout.split()[-2:])
    assert soft == (65536 if hard == -1 else min(65536, hard)), done
