"""The command `instep`. Nothing heavy is imported before the command line is found to be right."""

from __future__ import annotations

import difflib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from instep import __version__
from instep.errors import ConfigError, InstepError
from instep.private import private_files

# Commands of slime that are not there: why, and what to do.
MISSING = {
    "train-async": (
        "asynchronous training comes later: rollouts and steps take turns",
        "run `instep train` with the same flags; --partial-rollout continues what a rollout leaves unfinished",
    ),
    "convert": (
        "no conversion is needed: --hf-checkpoint, --load and --ref-load take Hugging Face folders, --save-hf writes "
        "them",
        "convert a checkpoint of another framework with a tool of that framework, to a Hugging Face folder",
    ),
}
COMMANDS = ("train", "sft", "dpo", "serve", "plan", "report", "samples", "doctor")

HELP = """\
usage: instep COMMAND ...

  train     reinforcement learning: rollout, reward, step, weight sync
  sft       supervised fine-tuning through the same trainer
  dpo       direct preference optimization of pairs of responses, through the same trainer
  serve     a checkpoint behind OpenAI's routes: the engines and the router of a run, without a trainer
  plan      where the flags of `train` or `sft` would put ranks and engines; starts nothing
  report    RUN_DIR: write the run's report.html
  samples   RUN_DIR: show prompts, responses, masks, log-prob gaps, rewards and weight versions
  doctor    [RUN_DIR]: check this installation, or what became of a run

`instep COMMAND --help` explains a command; `instep --version` prints the version. SIGUSR1 to a running train, sft
or dpo writes the stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt; docs/debugging.md says more.
docs/quick_start.md goes from a clone to a task of your own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, that of the error (2: a wrong command line), or 130 (interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _terminate_like_interrupt()
        with private_files():
            return _run(words)
    except InstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended; a second Ctrl-C changes nothing
        print("interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(HELP)
    elif command == "--version":
        print(f"instep {__version__}")
    elif command in ("train", "sft", "dpo"):
        _train(command, rest)
    elif command == "serve":
        _serve(rest)
    elif command == "plan":
        _plan(rest)
    elif command == "report":
        _report(rest)
    elif command == "samples":
        from instep.observability.show_samples import main as samples

        return samples(rest)
    elif command == "doctor":
        from instep.doctor.command import main as doctor

        return doctor(rest)
    elif command in MISSING:
        what, remedy = MISSING[command]
        raise ConfigError(what, where=f"instep {command}", remedy=remedy)
    else:
        like = difflib.get_close_matches(command, COMMANDS, n=1)
        remedy = f"did you mean `instep {like[0]}`?" if like else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command '{command}'", where="instep", remedy=remedy)
    return 0


def _train(command: str, words: list[str]) -> None:
    if _helps(command, words):
        return
    if sys.__stderr__ is not None:  # until the controller takes SIGUSR1 over: it must not end the process
        faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    _import_from_here()
    from instep.arguments import parse

    args = parse(words, command)
    from instep.preflight import check_inputs

    check_inputs(args)
    if args.device == "auto":
        from instep.controller.device import device_here

        args = parse([*words, "--device", device_here()], command)  # defaults and rules depend on it
    from instep.observability.output import lasting_output

    with lasting_output(Path(args.run_dir) / "logs"):
        if command in ("sft", "dpo"):
            from instep.sft import sft

            sft(args)
        else:
            from instep.train import train

            train(args)


def _helps(command: str, words: list[str]) -> bool:
    """Print the help of a command if `words` ask for it, and return whether they do."""
    if "-h" not in words and "--help" not in words:
        return False
    from instep.arguments.engine_help import TOPICS, format_engine_help
    from instep.arguments.help import format_help

    topic = next((word for word in words if word in TOPICS), None)
    print(format_help(command) if topic is None else format_engine_help(TOPICS[topic]))
    return True


def _serve(words: list[str]) -> None:
    if _helps("serve", words):
        return
    from instep.arguments import parse

    args = parse(words, "serve")
    from instep.checkpoints.hf_export import check_files, check_hf_checkpoint
    from instep.serve import serve

    check_hf_checkpoint(args.hf_checkpoint)
    check_files(args.hf_checkpoint, needs_chat_template=False)
    serve(args)


def _plan(words: list[str]) -> None:
    if "-h" in words or "--help" in words:
        print(
            "usage: instep plan [--FLAG ...]\n\nPrint where ranks and engines go on a cluster of nodes with "
            "--num-gpus-per-node GPUs.\nTakes the flags of `instep train`, needs none and starts nothing."
        )
        return
    from instep.arguments import parse
    from instep.cluster.engine_plan import describe_engines
    from instep.cluster.placement import make_plan, table

    args = parse(words, "plan")
    for note in args.notes:
        print(note)
    from rich.console import Console

    Console().print(table(make_plan(args)))
    if args.rollout_backend != "auto" or args.device != "cpu":  # else engines of which there is nothing to show
        for line in describe_engines(args):
            print(line)


def _report(words: list[str]) -> None:
    if "-h" in words or "--help" in words:
        print("usage: instep report RUN_DIR\n\nWrite RUN_DIR/report.html from the run's metrics.")
        return
    if len(words) != 1:
        what = f"takes one folder, got {len(words)}"
        raise ConfigError(what, where="instep report", remedy="instep report runs/train")
    folder = Path(words[0])
    if not (folder / "config.json").is_file():
        what = f"{folder} is no folder of a run: it has no config.json"
        raise ConfigError(what, where="instep report", remedy="give the --run-dir of a run")
    from instep.observability.report import make_report

    print(make_report(folder))


def _import_from_here() -> None:
    """Let hooks be modules of the current folder, in this process and all children, as with `python train.py`."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *(p for p in paths if p)])


def _terminate_like_interrupt() -> None:
    """Handle SIGTERM, and the end of the terminal, like Ctrl-C, so that children end in order, with a report.

    Only the main thread may set a handler; `nohup` keeps SIGHUP ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, interrupt)


if __name__ == "__main__":
    sys.exit(main())
