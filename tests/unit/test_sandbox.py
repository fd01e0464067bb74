"""Code of a model sees nothing of the host, has limits, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from instep.errors import ConfigError
from instep.rollout.sandbox import Limits, run, run_python
from tests.bounds import allowed
from tests.e2e.commands import gone_within

ROOT = Path(__file__).parents[2]
_HAS = {"bubblewrap": shutil.which("bwrap") is not None, "namespaces": True}


@pytest.fixture(params=_HAS)
def python(request, monkeypatch):
    """`run_python` by one of the means, as a function that waits."""
    means = request.param
    if not _HAS[means]:
        pytest.skip("bubblewrap is not installed")
    probe = asyncio.run(run._in_sandbox(means, "print(6 * 7)", "", Limits(seconds=30)))
    if probe.stdout != "42\n":
        pytest.skip(f"this host does not let us: {probe.stderr.strip()}")
    monkeypatch.setattr(run, "_found", (means, ""))
    return lambda code, stdin="", **limits: asyncio.run(run_python(code, stdin, limits=Limits(**limits)))


_WORDS = {"--size": 1, "--tmpfs": 1, "--ro-bind": 2, "--symlink": 2, "--dev": 1, "--remount-ro": 1, "--chdir": 1}
_WORDS |= {"--unshare-all": 0, "--die-with-parent": 0, "--new-session": 0, "--clearenv": 0, "--cap-drop": 1}


def test_what_bubblewrap_is_asked_for(tmp_path, monkeypatch):
    """Also where it is not installed: a program in its place tells its arguments."""
    stand_in = tmp_path / "bwrap"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    limits = Limits(seconds=60, memory=300 << 20, processes=3, file_bytes=1000)
    words = json.loads(asyncio.run(run._in_sandbox("bubblewrap", "print(1)", "", limits)).stdout)
    start = words.index(os.path.realpath(sys.executable))
    flags, program, asked = iter(words[:start]), words[start:], []
    for flag in flags:
        asked.append((flag, *(next(flags) for _ in range(_WORDS[flag]))))  # another flag may give something away
    one, at = {words[0] for words in asked}, {words: i for i, words in enumerate(asked)}
    assert {"--unshare-all", "--die-with-parent", "--new-session", "--clearenv"} <= one and ("--cap-drop", "ALL") in at
    assert at["--size", str(run.FILES_BYTES)] + 1 == at["--tmpfs", "/tmp"], "the one file system that is written to"
    assert at["--dev", "/dev"] + 1 == at["--remount-ro", "/dev"] and asked[-1] == ("--remount-ro", "/")
    assert [words for words in asked if words[0] in ("--tmpfs", "--dev")] == [("--tmpfs", "/tmp"), ("--dev", "/dev")]
    bound = {words[1:] for words in asked if words[0] == "--ro-bind"}
    system = {"/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", sys.base_prefix}
    assert ("/usr", "/usr") in bound and all(source == target and source in system for source, target in bound)
    linked = {words[2]: words[1] for words in asked if words[0] == "--symlink"}
    assert linked == {path: os.readlink(path) for path in system if os.path.islink(path)}

    assert program[1:5] == ["-I", "-S", "-c", run.BOOT.read_text()] and len(program) == 6
    limited = {"RLIMIT_AS": 300 << 20, "RLIMIT_CPU": 60, "RLIMIT_FSIZE": 1000, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    settings = {"limits": {**limited, "RLIMIT_NPROC": 4}, "sandbox": True}
    assert json.loads(program[5]) == settings | {"calls": run.CALLS.read_text(), "size": len("print(1)")}


def test_it_computes_with_input_and_output(python):
    assert python("import sys; print(int(sys.stdin.read()) * 7)", "6") == ("42\n", "", 0)
    assert python("import sys; sys.exit(3)").status == 3
    failed = python("1 / 0")
    assert failed.status == 1 and failed.stdout == "" and "ZeroDivisionError" in failed.stderr
    assert python("print('\\ud800'.encode('utf-8', 'replace'))").stdout == "b'?'\n"


def test_it_works_under_the_umask_of_a_run(python):
    before = os.umask(0o077)
    try:
        assert (
            python("import random; open('/tmp/x', 'w').write('a'); print(random.Random(0).random() > 0)").stdout
            == "True\n"
        )
    finally:
        os.umask(before)


def test_it_sees_no_file_of_the_host(python, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("1234")
    secret.chmod(0o644)
    paths = [str(secret), "/etc/passwd", str(ROOT), "/root/.bashrc"]
    assert python(f"import os\nprint([os.path.exists(path) for path in {paths}])").stdout == f"{[False] * 4}\n"
    write = "for path in ('/x', '/usr/x', '/etc/x'):\n    try:\n        open(path, 'w')\n"
    write += (
        "    except OSError as e:\n        print('no')\nopen('/tmp/x', 'w').write('yes'); print(open('/tmp/x').read())"
    )
    assert python(write).stdout == "no\nno\nno\nyes\n"
    assert not Path("/tmp/x").exists()


def test_it_sees_no_process_and_no_environment_of_the_host(python, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1234")
    seen = python(
        "import os, glob\nprint('A_SECRET' in os.environ, glob.glob('/proc/[0-9]*/environ'))\n"
        f"try:\n    os.kill({os.getpid()}, 0)\nexcept ProcessLookupError:\n    print('nobody')\nprint(os.getpid() < 10)"
    )
    assert seen.stdout == "False []\nnobody\nTrue\n", seen.stderr


def test_it_has_no_network(python):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 2)\n    print('in')\n"
        assert python(code + "except OSError:\n    print('out')").stdout == "out\n"


def test_limits(python):
    assert "MemoryError" in python("x = 'a' * 10**9", memory=256 << 20).stderr
    started = time.monotonic()
    assert python("while True: pass", seconds=1.0).status is None
    assert python("import time; time.sleep(60)", seconds=1.0).status is None
    assert time.monotonic() - started < allowed(15)
    much = python("while True: print('a' * 10000)", seconds=20.0)
    assert much.status is None and 0 < len(much.stdout) <= run.OUTPUT_BYTES
    large = "import os\nopen('/tmp/x', 'wb', 0).write(b'a' * 2000); print(os.path.getsize('/tmp/x'))"
    assert python(large, file_bytes=1000).stdout == "1000\n"
    assert "Resource temporarily unavailable" in python("import os; os.fork()").stderr or os.geteuid() == 0


BEYOND = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *args):
    done = getattr(libc, name)(*args)
    print(name, "did" if done >= 0 else errno.errorcode[ctypes.get_errno()])
tried("shmget", 0, 1 << 30, 0o1600)
tried("semget", 0, 32000, 0o1600)
tried("msgget", 0, 0o1600)
tried("mq_open", b"/q", os.O_CREAT | os.O_RDWR, 0o600, None)
tried("memfd_create", b"m", 0)
tried("unshare", 0x10000000)
tried("setns", 0, 0)
for number in (425, 447):
    tried("syscall", number, 1, 0)
tried("syscall", {clone}, 0x10000011, 0, 0, 0, 0)
tried("mount", b"none", b"/tmp", b"tmpfs", 0, None)
"""


def test_no_memory_beyond_its_limits(python):
    """Segments, queues and files without a name, and file systems of a user namespace of its own, are in no limit."""
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    seen = python(BEYOND.replace("{clone}", str(clone)), processes=4)
    assert {line.split()[1] for line in seen.stdout.splitlines()} == {"EPERM"} and seen.stdout.count("\n") == 11, seen
    fill = """
import os
total = 0
for folder, _, _ in os.walk("/"):
    for i in range(40):
        try:
            total += open(f"{folder}/x{i}", "wb", 0).write(bytes(1 << 20))
        except OSError:
            break
print(total)
"""
    filled = python(fill, seconds=60.0)
    assert 2 << 20 < int(filled.stdout) <= run.FILES_BYTES, filled


def test_threads_and_further_programs_work(python):
    code = "import subprocess, sys, threading\nt = threading.Thread(target=lambda: print('thread', flush=True))\n"
    code += "t.start(); t.join()\nsubprocess.run([sys.executable, '-I', '-S', '-c', 'print(7)'], check=True)"
    assert python(code, processes=4) == ("thread\n7\n", "", 0)


def test_an_unknown_machine_has_no_sandbox(monkeypatch):
    before = run.BOOT.read_text()
    assert before.count('"x86_64": (') == 1 and before.count('"aarch64": (') == 1
    text = before.replace('"x86_64": (', '"x": (').replace('"aarch64": (', '"a": (')
    monkeypatch.setattr(run, "BOOT", SimpleNamespace(read_text=lambda: text))
    for means in ("namespaces", "none"):
        done = asyncio.run(run._in_sandbox(means, "print('ran')", "", Limits(seconds=30)))
        assert done.stdout == ("ran\n" if means == "none" else "")
        assert means == "none" or "no sandbox" in done.stderr or "no namespaces" in done.stderr


def test_what_it_starts_dies_with_it(python):
    """A child that has left its session and ignores its parent's end is gone when the sandbox is."""
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3456)\nprint('left')"
    assert python(code, processes=4, seconds=5.0).stdout == "left\n"
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(3456)" in " ".join(p.info["cmdline"] or [])]


def test_a_program_cannot_outlive_its_time(python):
    """Not even one that asks the kernel not to end it with its parent, or ends its parent."""
    started = time.monotonic()
    escape = "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
    escape += "try:\n    os.kill(1, 9)\nexcept OSError:\n    pass\nprint(os.getpid() > 1, flush=True)\ntime.sleep(2345)"
    done = python(escape, seconds=3.0)
    assert done.status is None and done.stdout == "True\n" and time.monotonic() - started < allowed(15)
    began = [p for p in psutil.process_iter(["cmdline"]) if "RLIMIT_NPROC" in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(began, timeout=60)  # those of other tests end, too; this one would sleep on
    assert not alive


def test_without_a_sandbox_its_children_end_with_it(monkeypatch):
    monkeypatch.setattr(run, "_found", (None, "none"))
    code = "import subprocess\nsubprocess.Popen(['sleep', '1234'])\nprint('left')"
    started = time.monotonic()
    assert asyncio.run(run_python(code, unsafe=True, limits=Limits(seconds=6.0))).stdout == "left\n"
    assert time.monotonic() - started < allowed(15)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1234"]]


def test_a_cancelled_call_leaves_nothing(python):
    def children():
        return set(psutil.Process().children(recursive=True)) - before

    async def cancelled():
        task = asyncio.create_task(run_python("import time; time.sleep(60)", limits=Limits(seconds=60)))
        while not children():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        started = children()
        task.cancel()
        await asyncio.wait([task])
        return started

    before = set(psutil.Process().children(recursive=True))  # engines of other tests

    assert gone_within(asyncio.run(cancelled()), 5)


@pytest.mark.parametrize("means", ["namespaces", "none"])
def test_it_dies_with_its_parent(means):
    code = "import asyncio\nfrom instep.rollout.sandbox import Limits, run\n"
    code += f"asyncio.run(run._in_sandbox({means!r}, 'while True: pass', '', Limits(seconds=60)))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(parent.pid).children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert children and gone_within(children, 5)


def test_without_a_sandbox_nothing_runs_unless_the_user_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "_found", (None, "no namespaces: unshare: Operation not permitted"))
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w'); print('ran')"
    with pytest.raises(ConfigError, match="no sandbox for the code of a model: no namespaces: unshare") as caught:
        asyncio.run(run_python(code))
    assert not trace.exists() and "--unsafe-local-exec" in caught.value.remedy
    assert asyncio.run(run_python(code, unsafe=True)) == ("ran\n", "", 0) and trace.exists()
    assert "MemoryError" in asyncio.run(run_python("'a' * 10**9", unsafe=True, limits=Limits(memory=256 << 20))).stderr


def test_the_reward_of_the_docs(monkeypatch):
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    written = text.split("A reward that runs code:")[1].split("```python\n", 1)[1].rpartition("```")[0]
    names: dict[str, Any] = {}
    exec(written, names)
    args = SimpleNamespace(unsafe_local_exec=False)

    def rewarded(program: str) -> float:
        sample = SimpleNamespace(response=f"So:\n```python\n{program}\n```\nDone.", label=42)
        return asyncio.run(names["reward"](args, sample))

    assert [rewarded(p) for p in ("print(6 * 7)", "print(6 * 8)", "print(42); 1 / 0")] == [1.0, 0.0, 0.0]
