"""The first program in a sandbox: `python -I -S -c TEXT SETTINGS`, with a line of its length and the code on its input.

It sets limits and allows system calls, which the code cannot undo, reads the code, and becomes it. What is not in CALLS
is forbidden: keys of the kernel, bpf, io_uring, tracing, mounts, and all that makes memory that no limit of a process
counts (System V, files without a name). Its session keyring is new, as the user's holds the user's secrets.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys

# The calls that are allowed: name, number on x86_64, number on aarch64 (see asm/unistd_64.h and asm-generic/unistd.h).
CALLS = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 lseek:8:62 open:2 openat:257:56 openat2:437:437 creat:85 close:3:57
close_range:436:436 dup:32:23 dup2:33 dup3:292:24 fcntl:72:25 flock:73:32 ioctl:16:29 pipe:22 pipe2:293:59
sendfile:40:71 splice:275:76 tee:276:77 copy_file_range:326:285 fallocate:285:47 truncate:76:45
ftruncate:77:46 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 fadvise64:221:223 readahead:187:213
access:21 faccessat:269:48 faccessat2:439:439 stat:4 lstat:6 fstat:5:80 newfstatat:262:79 statx:332:291
statfs:137:43 fstatfs:138:44 getdents:78 getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83
mkdirat:258:34 rmdir:84 rename:82 renameat:264:38 renameat2:316:276 link:86 linkat:265:37 unlink:87
unlinkat:263:35 symlink:88 symlinkat:266:36 readlink:89 readlinkat:267:78 mknod:133 mknodat:259:33 chmod:90
fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92 fchown:93:55 lchown:94 fchownat:260:54 umask:95:166
utime:132 utimes:235 futimesat:261 utimensat:280:88 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10
listxattr:194:11 llistxattr:195:12 flistxattr:196:13 inotify_init:253 inotify_init1:294:26
inotify_add_watch:254:27 inotify_rm_watch:255:28
brk:12:214 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 msync:26:227 mlock:149:228
mlock2:325:284 munlock:150:229 mlockall:151:230 munlockall:152:231 mseal:462:462 membarrier:324:283
clone:56:220 fork:57 vfork:58 execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260
waitid:247:95 kill:62:129 tkill:200:130 tgkill:234:131 pidfd_open:434:434 pidfd_send_signal:424:424
getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155 getpgrp:111 setpgid:109:154 getsid:124:156
setsid:112:157 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 capget:125:90 prctl:157:167 arch_prctl:158 getrlimit:97:163
setrlimit:160:164 prlimit64:302:261 getrusage:98:165 getpriority:140:141 setpriority:141:140
sched_yield:24:124 sched_getaffinity:204:123 sched_setaffinity:203:122 sched_getparam:143:121
sched_getscheduler:145:120 sched_getattr:315:275 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_rr_get_interval:148:127 getcpu:309:168 set_tid_address:218:96 set_robust_list:273:99
get_robust_list:274:100 rseq:334:293 uname:63:160 sysinfo:99:179 times:100:153 restart_syscall:219:128
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 rt_sigsuspend:130:133 sigaltstack:131:132 signalfd:282
signalfd4:289:74 pause:34 alarm:37
futex:202:98 futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456 select:23
pselect6:270:72 poll:7 ppoll:271:73 epoll_create:213 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232
epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284 eventfd2:290:19 nanosleep:35:101 clock_nanosleep:230:115
getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85 timerfd_settime:286:86
timerfd_gettime:287:87 time:201 gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114
getrandom:318:278
socket:41:198 socketpair:53:199 connect:42:203 accept:43:202 accept4:288:242 bind:49:200 listen:50:201
shutdown:48:210 getsockname:51:204 getpeername:52:205 setsockopt:54:208 getsockopt:55:209 sendto:44:206
recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 sendmmsg:307:269 recvmmsg:299:243
"""
NEWEST = 462  # a later call is unknown to this list: "not there", so that libraries take an older one
# Per machine: its number (AUDIT_ARCH), the place of its numbers in CALLS, and the call keyctl.
MACHINES = {
    "x86_64": (0xC000003E, 1, 250),
    "aarch64": (0xC00000B7, 2, 219),
}
CLONE3 = 435  # its flags lie in memory, where a filter does not look; libraries take clone instead
LOAD, IF_EQUAL, IF_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # see seccomp(2) and linux/filter.h
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
NR, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
NAMESPACES = 0x7E020000  # CLONE_NEW*: in a user namespace of its own it could mount more
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: others (AF_VSOCK) are in no network namespace
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
JOIN_SESSION_KEYRING = 1


def steps_for(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter's instructions: code, steps to skip if true, if false, operand."""
    arch, place, _ = MACHINES[machine]
    calls = [call.split(":") for call in CALLS.split()]
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
    for number in range(NEWEST + 2):  # where a range of numbers ends, and one that is treated otherwise begins
        if (number in allowed) != (number - 1 in allowed):
            steps += [(IF_LEAST, 1, 0, number), (RETURN, 0, 0, ALLOW) if number - 1 in allowed else forbidden]
    return [*steps, forbidden]


def forbid(machine: str) -> None:
    """Allow CALLS alone to this process and its children, for ever. Raises OSError where that cannot be."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the numbers of system calls are not known for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    # A container may forbid it, or the kernel have no keys: then the user's keyring stays, and the calls that reach it
    # are forbidden below all the same.
    libc.syscall(MACHINES[machine][2], JOIN_SESSION_KEYRING, None)
    steps = steps_for(machine)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    prog = struct.pack("@HP", len(steps), ctypes.addressof(program))
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
