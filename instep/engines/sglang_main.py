"""`python -m instep.engines.sglang_main ...`: SGLang's server, in a process that ends with its parent.

A CPU, and a GPU host without FlashInfer, need the stand-ins for absent packages. SGLang's children import this file
again if they are spawned.
"""

import sys

from instep.system.processes import follow_parent
from instep_engine.sglang import check
from instep_engine.sglang.stand_ins import prepare

prepare()

if __name__ == "__main__":
    follow_parent()
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found]

    load_plugins()
    check()  # without the plugin no route would ask for a key
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    run_server(prepare_server_args(sys.argv[1:]))
