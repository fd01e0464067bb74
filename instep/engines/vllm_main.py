"""`python -m instep.engines.vllm_main serve MODEL ...`: vLLM's command line, in a process that ends with its parent."""

import sys

from instep.system.processes import follow_parent

if __name__ == "__main__":  # vLLM's children import this file again
    follow_parent()
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
