"""A program in the sandbox makes the system calls of a list alone, and has no key of the user's."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.rollout.sandbox import Limits, run, run_python
from tests.bounds import allowed

ROOT = Path(__file__).parents[2]
KEYCTL = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
# What must not be allowed, by its numbers on x86_64 and on aarch64.
FORBIDDEN = {
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "setns": (308, 268),
    "pidfd_getfd": (438, 438),
    "personality": (135, 92),
    "syslog": (103, 116),
}


@pytest.fixture(scope="module")
def boot():
    """The names of boot.py, which runs as a program."""
    text = run.BOOT.read_text(encoding="utf-8")
    assert text.endswith("\nmain()\n")
    names: dict[str, Any] = {}
    exec(text.removesuffix("main()\n"), names)
    return SimpleNamespace(**names)


def decided(steps, arch, number, argument=0):
    """What the filter says of a call: a small machine for the instructions of seccomp(2) that it uses."""
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            value = {0: number, 4: arch, 16: argument & 0xFFFFFFFF}[operand]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand != 0}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "arch", "place"), [("x86_64", 0xC000003E, 1), ("aarch64", 0xC00000B7, 2)])
def test_the_filter_allows_the_list_alone(boot, machine, arch, place):
    steps = boot.steps_for(machine, run.CALLS.read_text())
    assert len(steps) < 4096
    lines = [line.split(":") for line in run.CALLS.read_text().split()]
    listed = {int(line[place]): line[0] for line in lines if len(line) > place and line[place]}
    assert len({line[0] for line in lines}) == len(lines) and listed
    error = {name: 0x50000 | getattr(errno, name) for name in ("EPERM", "ENOSYS", "EAFNOSUPPORT")}
    for number in range(700):
        for argument in (0, 1, 0x11):
            found = decided(steps, arch, number, argument)
            if listed.get(number) in ("socket", "socketpair"):
                assert found == (0x7FFF0000 if argument == 1 else error["EAFNOSUPPORT"])
            elif number in listed:
                assert found == 0x7FFF0000, number
            else:
                assert found == (error["ENOSYS"] if number == 435 or number > 462 else error["EPERM"]), number
    by_name = {name: number for number, name in listed.items()}
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decided(steps, arch, by_name["clone"], flag | 0x11) == error["EPERM"]
    assert decided(steps, arch, by_name["clone"], 0x3D0F00) == 0x7FFF0000, "a thread"
    families = {family for family in range(64) if decided(steps, arch, by_name["socket"], family) == 0x7FFF0000}
    assert families == {1, 2, 10}, "AF_UNIX, AF_INET, AF_INET6"
    for name, numbers in FORBIDDEN.items():
        assert decided(steps, arch, numbers[place - 1]) == error["EPERM"], name
    assert decided(steps, 0x40000003, 3) == 0x80000000, "calls of another architecture (i386) end the process"
    assert decided(steps, arch, 0x40000000 | 1) == error["ENOSYS"], "x32"


@pytest.mark.parametrize(("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "")])
def test_its_numbers_are_those_of_the_headers(machine, header):
    path = Path("/usr/include") / (header or "asm-generic/unistd.h")
    if not path.exists():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", path.read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in found}
    numbers |= {} if header else {"newfstatat": numbers["fstatat"]}
    place = 1 if header else 2
    lines = [line.split(":") for line in run.CALLS.read_text().split()]
    listed = {line[0]: int(line[place]) for line in lines if len(line) > place and line[place]}
    late = {name for name, number in listed.items() if number > 450}  # of kernels after these headers
    assert {name: number for name, number in listed.items() if name not in late | numbers.keys()} == {}
    assert all(numbers.get(name, number) == number for name, number in listed.items())
    assert all(numbers.get(name, pair[place - 1]) == pair[place - 1] for name, pair in FORBIDDEN.items())


@pytest.fixture
def sandbox():
    probe = asyncio.run(run._in_sandbox("namespaces", "print(6 * 7)", "", Limits(seconds=60)))
    if probe.stdout != "42\n":
        pytest.skip(f"this host does not let us: {probe.stderr.strip()}")


EVERY_CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
done = {}
for number in NUMBERS:
    if libc.syscall(number, -1, -1, -1, -1, -1, -1) >= 0:
        done[number] = "did"
    elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        done[number] = errno.errorcode[ctypes.get_errno()]
import socket
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_DGRAM)
        done[family] = "did"
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            done[family] = str(error)
print(done)
"""


def test_a_program_can_make_no_other_call(sandbox, boot):
    place = boot.MACHINES[os.uname().machine][1]
    calls = [call.split(":") for call in run.CALLS.read_text().split()]
    listed = {int(call[place]) for call in calls if len(call) > place and call[place]}
    others = sorted(set(range(600)) - listed - {335, 336})  # x86_64: the kernel's own, for uprobes; no filter sees them
    done = asyncio.run(run_python(EVERY_CALL.replace("NUMBERS", str(others)), limits=Limits(seconds=allowed(60))))
    assert done.stdout == "{}\n", done


KEEPER = """
import asyncio, ctypes, sys
from types import SimpleNamespace
from instep.rollout.sandbox import Limits, run
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
session = libc.syscall(KEYCTL, 1, None)
if session < 0:
    sys.exit("no keys")
key = libc.syscall(ADD_KEY, b"user", b"instep-test", b"secret", 6, -3)
assert key > 0, ctypes.get_errno()
text = run.CALLS.read_text()
if sys.argv[1] == "allowed":  # keyctl alone: what the keyring of its own keeps from it
    text += " keyctl:250:219 add_key:248:217 request_key:249:218"
run.CALLS = SimpleNamespace(read_text=lambda: text)
code = '''
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
room = ctypes.create_string_buffer(64)
def tried(*words):
    return "did" if libc.syscall(*words) >= 0 else errno.errorcode[ctypes.get_errno()]
key = int(sys.stdin.read())
print(tried(KEYCTL, 10, -3, b"user", b"instep-test", 0), tried(KEYCTL, 11, key, room, 64),
      tried(KEYCTL, 2, key, b"x", 1))
print(tried(ADD_KEY, b"user", b"other", b"x", 1, -3), room.value)
'''
print(asyncio.run(run._in_sandbox("namespaces", code, str(key), Limits(seconds=60))))
room = ctypes.create_string_buffer(64)
libc.syscall(KEYCTL, 11, key, room, 64)
print(room.value)
"""


def _keys(how: str) -> str:
    add = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    text = KEEPER.replace("KEYCTL", str(KEYCTL)).replace("ADD_KEY", str(add))
    done = subprocess.run([sys.executable, "-c", text, how], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "no keys" in done.stderr:
        pytest.skip("this kernel has no keys, or a container forbids them")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_reaches_no_key_of_the_session(sandbox):
    seen = _keys("forbidden")
    assert "EPERM EPERM EPERM\\nEPERM b" in seen and seen.endswith("b'secret'\n"), seen


def test_its_session_keyring_is_its_own(sandbox):
    """Even if it might make those calls it would not find the key, and not possess it."""
    seen = _keys("allowed")
    assert re.search(r"(ENOKEY|EACCES) EACCES EACCES\\ndid b", seen) and seen.endswith("b'secret'\n"), seen
