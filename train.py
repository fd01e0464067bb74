"""`python train.py ...` is `instep train ...`."""

import sys

from instep.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
