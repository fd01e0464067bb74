"""What a program can see of how it was started, as JSON; then it does what its arguments say."""

import json
import os
import signal
import sys

if __name__ == "__main__":
    about = {
        "argv": sys.argv[1:],
        "name of its file": os.path.basename(sys.argv[0]),
        "title": open("/proc/self/cmdline").read().replace("\0", " ").strip(),
        "folder": os.getcwd(),
        "path": sys.path,
        "environment": {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"},
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],  # without that of the folder
        "leads its session": os.getsid(0) == os.getpid(),
        "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "collects": __import__("gc").isenabled(),
        "umask": os.umask(0o77),
        "reads": sys.stdin.read(),
    }
    print(json.dumps(about), flush=True)
    print("to stderr", file=sys.stderr)
    if "--draw" in sys.argv:
        import numpy

        print("drawn", numpy.random.random(), file=sys.stderr)
    if "--compiler" in sys.argv:
        import torch._dynamo

        print("disabled", torch._dynamo.config.disable, file=sys.stderr)
    if "--raise" in sys.argv:
        raise ValueError("as asked")
    if "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(sys.argv[-1] if "--say" in sys.argv else int(sys.argv[-1]))
