"""The first program in a sandbox: `python -I -S -c TEXT SETTINGS`, with the code at the beginning of its input.

It sets limits and a list of allowed system calls, which the code cannot undo. Then it reads the code and becomes it.
Every call that is not in `system_calls.txt` is forbidden: kernel keys, bpf, io_uring, tracing, mounts, and all calls
that make memory outside the limits of a process (System V, files without a name). It gets a new session keyring,
because the user's keyring holds secrets.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys

NEWEST = 462  # a later call fails as "not there", so that libraries use an older one
# Per machine: its number (AUDIT_ARCH), the column of its numbers in `system_calls.txt`, and the call keyctl.
MACHINES = {
    "x86_64": (0xC000003E, 1, 250),
    "aarch64": (0xC00000B7, 2, 219),
}
CLONE3 = 435  # its flags are in memory, where a filter cannot look; libraries use clone instead
LOAD, IF_EQUAL, IF_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # see seccomp(2) and linux/filter.h
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
NR, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
NAMESPACES = 0x7E020000  # CLONE_NEW*: in a new user namespace the code could mount more
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: others (AF_VSOCK) ignore network namespaces
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
JOIN_SESSION_KEYRING = 1


def steps_for(machine: str, allowed_calls: str) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions: code, steps to skip if true, if false, operand.

    Args:
        allowed_calls: `name:number on x86_64:number on aarch64`, separated by blanks; a number may be missing.
    """
    arch, place, _ = MACHINES[machine]
    calls = [call.split(":") for call in allowed_calls.split()]
    numbers = {call[0]: int(call[place]) for call in calls if len(call) > place and call[place]}
    forbidden = (RETURN, 0, 0, ERRNO | errno.EPERM)
    steps = [(LOAD, 0, 0, ARCH), (IF_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NR)]
    steps += [(IF_LEAST, 1, 0, NEWEST + 1), (IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    steps += [(IF_EQUAL, 0, 4, numbers["clone"]), (LOAD, 0, 0, FIRST_ARGUMENT), (IF_SET, 0, 1, NAMESPACES)]
    steps += [forbidden, (RETURN, 0, 0, ALLOW)]
    steps += [(IF_EQUAL, 1, 0, numbers["socket"]), (IF_EQUAL, 0, 3 + len(FAMILIES), numbers["socketpair"])]
    steps += [(LOAD, 0, 0, FIRST_ARGUMENT)]
    steps += [(IF_EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    steps += [(RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    allowed = set(numbers.values())
    for number in range(NEWEST + 2):  # where a range ends, and the next range with another treatment begins
        if (number in allowed) != (number - 1 in allowed):
            steps += [(IF_LEAST, 1, 0, number), (RETURN, 0, 0, ALLOW) if number - 1 in allowed else forbidden]
    return [*steps, forbidden]


def forbid(machine: str, allowed_calls: str) -> None:
    """Allow only these calls to this process and its children, for ever. Raises OSError where that is not possible."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the numbers of system calls are not known for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    # A container may forbid it, or the kernel may have no keys. Then the user's keyring stays, but the calls that reach
    # it are forbidden below.
    libc.syscall(MACHINES[machine][2], JOIN_SESSION_KEYRING, None)
    steps = steps_for(machine, allowed_calls)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    prog = struct.pack("@HP", len(steps), ctypes.addressof(program))
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, prog, 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def read(size: int) -> bytes:
    """Read so many bytes of the standard input and no more: the rest is the program's."""
    parts = []
    while size and (part := os.read(0, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    settings = json.loads(sys.argv.pop())
    try:
        forbid(os.uname().machine, settings["calls"])
    except OSError as error:
        if settings["sandbox"]:
            sys.exit(f"no sandbox: {error}")
    for name, most in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    code = read(settings["size"])
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


main()
