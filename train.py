"""`python train.py ...` is `instep train ...`, with slime's two functions for a script of one's own.

Flags that `extra_args_provider` adds to an `argparse.ArgumentParser` reach hooks as `args.<name>`.
"""

import sys

from instep.script import parse_args, train
from instep.system.fork_server import beside

__all__ = ["parse_args", "train"]

if __name__ == "__main__":
    with beside():  # before other threads begin
        try:
            from pretrain_gpt import extra_args_provider  # a module of the user's, or of the Megatron on PYTHONPATH
        except Exception as error:  # noqa: BLE001 - of whatever it imports
            extra_args_provider = None
            if not (isinstance(error, ModuleNotFoundError) and error.name == "pretrain_gpt"):
                print(f"pretrain_gpt adds no flags: {type(error).__name__}: {error}", file=sys.stderr)
        train(parse_args(extra_args_provider))
