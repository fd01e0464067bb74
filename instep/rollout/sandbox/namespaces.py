"""Runs a command in new namespaces: `python -I -S namespaces.py PARENT BINDS COMMAND...` (no package needed).

If BINDS is null it makes no namespaces, and the command only dies with its parent.

The command is process 1 of a PID namespace, so everything that it has started dies with it. It has no network and no
/proc. It sees only BINDS of the host's files, read-only. /tmp is a separate small file system. A user who is not root
does this in a user namespace. Root first gives up its rights, so that limits hold for the command.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = (1, 2, 4, 32, 4096, 16384, 1 << 18)
KEPT = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime: a user namespace may not remove them
DETACH = 2
MOUNT_SETATTR, RECURSIVE = 442, 0x8000
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS = 1, 4, 38
NOBODY = 65534
TMP_BYTES = 16 << 20
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}


def call(name: str, *args: int | bytes | None) -> None:
    if getattr(LIBC, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode() or None)


def own_user_namespace(flags: int, proc: int, uid: int, gid: int) -> None:
    """Enter a user namespace and those of `flags`. `uid` and `gid` are the same in it as outside."""
    call("unshare", NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        file = os.open(name, os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def make_read_only(target: str, more: int) -> None:
    """Make a bound folder read-only, with every file system that is mounted below it."""
    attributes = struct.pack("QQQQ", RDONLY | NOSUID | more, 0, 0, 0)
    if LIBC.syscall(MOUNT_SETATTR, -100, target.encode(), RECURSIVE, attributes, len(attributes)) == 0:
        return
    number = ctypes.get_errno()
    with open("/proc/self/mountinfo") as mounts:
        below = [line for line in mounts if line.split()[4].startswith(f"{target}/")]
    if number != errno.ENOSYS or below:  # before Linux 5.12 only the top can be made read-only
        raise OSError(number, f"mount_setattr of {target}: {os.strerror(number)}")
    kept = os.statvfs(target).f_flag & KEPT
    mount("none", target, None, BIND | REMOUNT | RDONLY | NOSUID | more | kept)


def make_root(binds: list[str]) -> None:
    """Make a file system that holds only `binds`, and make it the root."""
    sources = {path: os.open(path, os.O_PATH) for path in binds if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in binds if os.path.islink(path)}
    mount("none", "/", None, REC | PRIVATE)
    new = "/tmp"  # only inside: files below /tmp of the host are reached by `sources`
    mount("tmpfs", new, "tmpfs", NOSUID | NODEV, f"size={TMP_BYTES},mode=755")
    for path, source in sources.items():
        target = new + path
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        mount(f"/proc/self/fd/{source}", target, None, BIND | REC)
        make_read_only(target, 0 if path.startswith("/dev/") else NODEV)
        os.close(source)
    for path, text in links.items():
        os.makedirs(os.path.dirname(new + path), exist_ok=True)
        os.symlink(text, new + path)
    os.makedirs(f"{new}/tmp", exist_ok=True)
    mount("tmpfs", f"{new}/tmp", "tmpfs", NOSUID | NODEV, f"size={TMP_BYTES},mode=1777")
    mount("none", new, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    os.chdir(new)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def end_as(child: int) -> None:
    """Wait until a child ends, and end in the same way."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.getpid() == 1:  # no signal ends process 1
            os._exit(128 + os.WTERMSIG(status))
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def die_with(parent: int) -> None:
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    parent, binds, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    die_with(parent)
    os.umask(0o022)  # not the umask of a run, which hides its files: the command runs as another user
    if binds is None:
        os.execve(command[0], command, ENVIRONMENT)
    apart = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    root = os.geteuid() == 0
    if root:
        call("unshare", apart)
    else:
        proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        own_user_namespace(apart, proc, os.geteuid(), os.getegid())
    alive, watched = os.pipe()
    child = os.fork()  # into the PID namespace, as its process 1
    if child:
        os.close(alive)
        end_as(child)
    os.close(watched)
    proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    make_root(binds)
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", DUMPABLE, 1, 0, 0, 0)  # otherwise its files in /proc belong to root
        own_user_namespace(0, proc, NOBODY, NOBODY)  # its processes are counted separately
    os.close(proc)
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
        os._exit(1)  # the parent died before it was watched
    except BlockingIOError:
        os.close(alive)
    program = os.fork()  # process 1 stays ours: its end ends all, and the program cannot prevent that
    if program:
        call("prctl", DUMPABLE, 0, 0, 0, 0)
        end_as(program)
    os.execve(command[0], command, ENVIRONMENT)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"no namespaces: {error}", file=sys.stderr)
        os._exit(1)
