"""The first program in a sandbox: `python -I -S -c TEXT SETTINGS`, with a line of its length and the code on its input.

It sets limits and forbids system calls, which the code cannot undo, reads the code, and becomes it. The forbidden
calls make memory that no limit of a process counts (System V and io_uring buffers, files without a name), or user
namespaces, whose owner could mount further file systems.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys

# Per machine: its number (AUDIT_ARCH), the numbers of clone and clone3, and those of the calls that are forbidden:
# shmget, semget, msgget, mq_open, memfd_create, memfd_secret, io_uring_setup, unshare, setns.
MACHINES = {
    "x86_64": (0xC000003E, 56, 435, (29, 64, 68, 240, 319, 447, 425, 272, 308)),
    "aarch64": (0xC00000B7, 220, 435, (194, 190, 186, 180, 279, 447, 425, 97, 268)),
}
LOAD, IF_EQUAL, IF_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # see seccomp(2) and linux/filter.h
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
NR, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
X32, NEWUSER = 0x40000000, 0x10000000
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2


def forbid(machine: str) -> None:
    """Forbid the calls to this process and its children, for ever. Raises OSError where that cannot be."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the numbers of system calls are not known for {machine}")
    arch, clone, clone3, forbidden = MACHINES[machine]
    steps = [(LOAD, 0, 0, ARCH), (IF_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NR)]
    tests = [(IF_EQUAL, clone3, errno.ENOSYS)]  # its flags lie in memory; libraries use clone instead
    tests += [(IF_EQUAL, number, errno.EPERM) for number in forbidden]
    tests += [(IF_LEAST, X32, errno.EPERM)] if machine == "x86_64" else []
    for how, number, error in tests:
        steps += [(how, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]
    steps += [(IF_EQUAL, 0, 3, clone), (LOAD, 0, 0, FIRST_ARGUMENT), (IF_SET, 0, 1, NEWUSER)]
    steps += [(RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    prog = struct.pack("@HP", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, prog, 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def line() -> bytes:
    """A line of the standard input, of which nothing more is taken: the rest is the program's."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(0, 1)):
        found += byte
    return found


def read(size: int) -> bytes:
    parts = []
    while size and (part := os.read(0, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    settings = json.loads(sys.argv.pop())
    try:
        forbid(os.uname().machine)
    except OSError as error:
        if settings["sandbox"]:
            sys.exit(f"no sandbox: {error}")
    for name, most in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    code = read(int(line()))
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


main()
