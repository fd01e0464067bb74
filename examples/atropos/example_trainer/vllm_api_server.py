"""The vLLM server of Atropos' guide: `instep atropos-serve`."""

import sys

from instep.cli import main

if __name__ == "__main__":
    sys.exit(main(["atropos-serve", *sys.argv[1:]]))
