"""A controller of an external engine; it runs the lines that it reads. `lease_holder URL KEY KIND FOLDER`."""

from __future__ import annotations

import sys

import torch  # noqa: F401 - what it reads may use it

from instep.engines import held_lease, keys
from instep.engines.engine import Engine
from instep.engines.kind import kind_of
from instep.errors import EngineError

LEASE = 4.0

if __name__ == "__main__":
    held_lease.LEASE_SECONDS, held_lease.RENEW_SECONDS = LEASE, 0.3
    url, key, kind, folder = sys.argv[1:]
    keys.know(url, key)
    engine = Engine("engine 0", url, None, kind_of(kind), written_in_place=bool(folder))
    for line in sys.stdin:
        try:
            exec(line)
            print("done", flush=True)
        except EngineError as error:
            print(error.what, "|", error.remedy, flush=True)
