"""`python train_async.py ...` is `instep train-async ...`."""

import sys

from instep.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train-async")
    sys.exit(main())
