"""`python -m instep.engines.sglang_router_main ...`: sglang-router behind a key; it ends with its parent."""

import argparse
import os

from instep.system.processes import follow_parent
from instep_engine.guard import KEY_VARIABLE


def main() -> None:
    follow_parent()
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="sglang-router", allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    args = RouterArgs.from_cli_args(parser.parse_args())
    args.api_key = os.environ[KEY_VARIABLE]  # all users of the host can read a command line
    args.prometheus_host = args.host  # the default is all addresses, and its metrics need no key
    Router.from_args(args).start()


if __name__ == "__main__":
    main()
