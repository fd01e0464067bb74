"""What a run says when a hook ends its process: without this, the shell shows no more than the number of a signal.

As a program (`python -I -S last_word.py PARENT STACKS HOOKS`) it waits for the end of the run's process, and names the
hook that Python's fault handler found at work, unless the run has said that it ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class LastWord:
    """From now until `close`, the end of this process by one of `hooks` gets a word (on Linux).

    Meanwhile `os._exit`, which ends a process without a word, raises SystemExit.

    Args:
        hooks: the user's functions that run here: flag and dotted path.
    """

    def __init__(self, hooks: Sequence[tuple[str, str]]):
        self._child: subprocess.Popen[bytes] | None = None
        if not hooks or sys.platform != "linux":
            return
        self._enabled = faulthandler.is_enabled()
        self._stacks = os.memfd_create("instep-stacks")
        faulthandler.enable(self._stacks)
        words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(self._stacks), json.dumps(hooks)]
        self._child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[self._stacks], start_new_session=True
        )
        from instep.system.endings import raise_for_exit  # the program below finds no packages yet

        self._take_back = raise_for_exit()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        self._take_back()
        faulthandler.disable()
        if self._enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        os.close(self._stacks)
        child.communicate(b"it ends\n")


def found(stacks: str, hooks: Sequence[Sequence[str]]) -> tuple[str, str]:
    """What has ended a process, and where, from what the fault handler wrote (perhaps nothing)."""
    from instep.system.endings import fault_of

    fault = fault_of(stacks)
    if (place := fault.place(hooks)) is not None:
        return f"{place[0]} ended the run's process by a fault: {fault.what}", place[1]
    what = f"the run's process was ended by a fault: {fault.what}" if fault.what else "the run's process was killed"
    at = "{}:{} in {}; ".format(*fault.frames[0]) if fault.frames else ""
    return what, f"{at}the hooks that run in it: {', '.join(f'{flag} {path}' for flag, path in hooks)}"


def main() -> None:
    parent, stacks, hooks = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    ended = os.pidfd_open(parent)
    select.select([0, ended], [], [])
    if select.select([0], [], [], 0)[0] and os.read(0, 100):
        return  # the run says that it ends
    select.select([ended], [], [])  # a hook may have closed its end of the pipe before
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from instep.errors import RolloutError

    what, where = found(os.pread(stacks, 1 << 20, 0).decode(errors="replace"), hooks)
    remedy = "correct that line; a kernel that ran out of memory says so in `dmesg`; run again to resume"
    print(RolloutError(what, where=where, remedy=remedy), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
