"""The trainer of Atropos' guide: `instep atropos-train`."""

import sys

from instep.cli import main

if __name__ == "__main__":
    sys.exit(main(["atropos-train", *sys.argv[1:]]))
