"""`instep view`: a page on loopback with the curves, times, samples, tokens and flags of runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from instep.errors import ConfigError
from instep.observability.view.runs import Runs, check_runs, runs_below
from instep.observability.view.server import FIRST_PORT, ViewServer
from instep.system.options import OptionParser

DESCRIPTION = """Show runs on a page of this host: live ones, finished ones, and those that failed. It only reads.

  instep view                         all runs below runs/, also those that begin later
  instep view runs/a runs/b           two runs in the same plots, and their flags compared
  ssh -L 8620:127.0.0.1:8620 HOST     first, for a run on another host

The page has five parts.
  curves     metrics of several runs in one plot, alarms where they were raised, and what each advises
  time       who waits for whom: phases of the last steps, and the requests that the engines had
  samples    by reward, status, length and group; prompts, tool calls and answers as turns; each token coloured by
             log-prob, gap between engine and trainer, entropy, mask, or the version of the weights that made it
  processes  memory of controller, ranks and engines; tokens per second of each engine
  flags      those that differ between the runs

A run logs 8 samples of each rollout; --num-logged-samples N logs more. docs/view.md explains each part."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = OptionParser("instep view", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="--run-dir of a run; default: all below runs/")
    first = f"default: the first free one from {FIRST_PORT} on; 0: any free one"
    out.add_argument("--port", type=int, metavar="PORT", help=first)
    return out


def main(words: Sequence[str]) -> int:
    """Run the command until Ctrl-C, and return its exit code."""
    options = parser().parse_args(words)
    if options.port is not None and not 0 <= options.port < 65536:
        raise ConfigError(f"there is no port {options.port}", where="instep view --port", remedy="give 0 to 65535")
    check_runs(options.runs)
    root = Path("runs")
    if not options.runs and not runs_below(root):
        raise ConfigError("there is no run below runs/", where="instep view", remedy="name its folder: instep view DIR")
    runs = Runs(lambda: options.runs or runs_below(root))
    with ViewServer(runs, options.port) as server:
        count = f"{(n := len(runs.all()))} run{'' if n == 1 else 's'}"
        print(f"{count}: {server.url}\nKeep the URL secret: it opens these runs. Ctrl-C ends the view.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
