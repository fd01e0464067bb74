"""`python train_async.py ...` is `instep train-async ...`."""

import sys

from instep.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-async", *sys.argv[1:]]))
