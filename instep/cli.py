"""The command `instep`. Nothing heavy is imported before the command line is checked."""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from instep import __version__
from instep.errors import ConfigError, InstepError
from instep.system import fork_server
from instep.system.hooks.neighbours import Command, added, commands
from instep.system.importing import first_import
from instep.system.kernel import allow_descriptors
from instep.system.private import private_files

if TYPE_CHECKING:
    from instep.arguments.args import Args

OWN = {
    "train": Command("reinforcement learning: rollout, reward, step, weight sync", "instep.cli:train", True),
    "train-async": Command("train while the next rollout is generated", "instep.cli:train_async", True),
    "sft": Command("supervised fine-tuning with the same trainer", "instep.cli:sft", True),
    "dpo": Command(
        "direct preference optimization on pairs of responses, with the same trainer", "instep.cli:dpo", True
    ),
    "serve": Command(
        "serve a checkpoint on OpenAI's routes: engines and router of a run, no trainer", "instep.cli:serve", True
    ),
    "plan": Command(
        "show where ranks and engines of a run would go, and their memory and time; starts nothing",
        "instep.preflight.plan.command:main",
    ),
    "profile": Command(
        "run three steps of `train`, and show a timeline of the last step and where its time went",
        "instep.cli:profile",
        True,
    ),
    "report": Command("RUN_DIR: write the run's report.html", "instep.cli:report"),
    "view": Command(
        "[RUN_DIR ...]: show runs in the browser: curves, times, samples, tokens, flags",
        "instep.observability.view.command:main",
    ),
    "samples": Command(
        "RUN_DIR: show prompts, responses, masks, log-prob gaps, rewards and weight versions",
        "instep.observability.show_samples:main",
    ),
    "convert": Command(
        "hf-to-megatron | megatron-to-hf | fp8-to-bf16: convert weights, read them back and compare",
        "instep.checkpoints.convert:main",
    ),
    "install": Command("vllm | sglang | trl | ...: install tested versions", "instep.preflight.install.command:main"),
    "doctor": Command(
        "[RUN_DIR]: check this installation, or the state of a run", "instep.preflight.doctor.command:main"
    ),
}

END = """
`instep COMMAND --help` explains a command; `instep --version` prints the version. SIGUSR1 to a running train,
train-async, sft or dpo writes the stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt;
see docs/debugging.md.
docs/quick_start.md leads from a clone to your own task."""


def overview() -> str:
    """Return the help of `instep` itself."""
    rows = (f"  {name:<15}{command.help}" for name, command in commands(OWN).items())
    return "\n".join(["usage: instep COMMAND ...", "", *rows, END])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 0, that of the error (2: a wrong command line), or 130 (interrupted)."""
    if argv is not None:
        return guarded(lambda: _run(list(argv)))
    return guarded(lambda: _run_beside(sys.argv[1:]))  # this process has no other thread yet


def guarded(work: Callable[[], int]) -> int:
    """Do the work of a command. Return its exit code; print its error, and return the error's exit code."""
    try:
        _terminate_like_interrupt()
        allow_descriptors()
        with private_files():
            code = work()
            print(end="", flush=True)
            return code
    except BrokenPipeError:
        if not _drop_lost_stdout():
            raise
        return 128 + signal.SIGPIPE
    except InstepError as error:
        _drop_lost_stdout()  # else Python reports at its exit that it could not flush
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything has ended; a second Ctrl-C changes nothing
        print("interrupted", file=sys.stderr)
        return 130


def _drop_lost_stdout() -> bool:
    """Send stdout to /dev/null if it is a pipe whose reader has ended (`| head`). Return whether it is."""
    stdout = select.poll()
    stdout.register(1, 0)  # reports only errors
    is_broken = bool(stdout.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return is_broken


def _run_beside(words: list[str]) -> int:
    """Run one command, with a fork server if it may start workers or engines."""
    starts = words[:1] and (command := commands(OWN).get(words[0])) is not None and command.starts
    with fork_server.beside() if starts else contextlib.nullcontext():
        return _run(words)


def _run(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(overview())
        return 0
    if command == "--version":
        print(f"instep {__version__}")
        return 0
    known = commands(OWN)
    if command not in known:
        like = difflib.get_close_matches(command, known, n=1)
        remedy = f"did you mean `instep {like[0]}`?" if like else f"the commands are {', '.join(known)}"
        raise ConfigError(f"unknown command '{command}'", where="instep", remedy=remedy)
    return known[command].run(rest)


def profile(words: list[str]) -> None:
    if _helps("profile", words):
        return
    from instep.controller.profile import of_profile

    run(of_profile(arguments("train", words)))


def _train(command: str, words: list[str]) -> None:
    if not _helps(command, words):
        run(arguments(command, words))


train, train_async, sft, dpo = (partial(_train, command) for command in ("train", "train-async", "sft", "dpo"))


def arguments(command: str, words: list[str]) -> Args:
    """Return the arguments of a command that trains, after all checks that are possible before a process starts.

    Raises:
        InstepError: the arguments or their files are wrong, or the run would not fit here.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # names the line of a hook that crashes this process
        if not callable(signal.getsignal(signal.SIGUSR1)):  # the controller of another run has it
            faulthandler.register(signal.SIGUSR1, sys.__stderr__)  # until the controller takes it over
    _import_from_here()
    from instep.arguments.config_file import expanded
    from instep.arguments.parse import parse
    from instep.system.gpus import memory_of_gpus, no_driver

    words = expanded(words)
    names = {word.partition("=")[0].replace("_", "-") for word in words}
    if not {"--device", "--dump-config"} & names and no_driver():
        words = [*words, "--device", "cpu"]
    args = parse(words, command)
    from instep.preflight.inputs import check_inputs

    check_inputs(args)
    if args.device != "cpu":
        from instep.controller.device import device_here
        from instep.preflight.plan.command import check_launch

        # Defaults and rules depend on the device; the plan depends on its memory.
        device = device_here() if args.device == "auto" else args.device
        size = memory_of_gpus() if device == "cuda" and args.cluster == "local" else None
        known = [] if size is None or "--gpu-memory-gb" in names else ["--gpu-memory-gb", f"{size:.2f}"]
        words = [*words, "--device", device, *known]
        args = parse(words, command)
        check_launch(args, words)
    return args


def run(args: Args) -> dict[str, Any]:
    """Train as `args.command` says, and return the run's summary.

    Raises:
        InstepError: the run cannot go on.
    """
    from instep.cluster.imports import preload
    from instep.observability.output import lasting_output

    preload(args)
    with lasting_output(Path(args.run_dir) / "logs"):
        with first_import("torch"):
            loop = loop_of(args)
        summary: dict[str, Any] = loop.train(args)
        return summary


def loop_of(args: Args) -> ModuleType:
    """Return the module with the loop of `args.command`: `steps` is its generator, `train` runs it."""
    return import_module("instep.train_async" if args.command == "train-async" else "instep.train_sync")


def _helps(command: str, words: list[str]) -> bool:
    """Print the help of a command if `words` ask for it, and return whether they do."""
    if "-h" not in words and "--help" not in words:
        return False
    from instep.arguments.help import PROFILE_HELP, TOPICS, format_engine_help, format_help

    topic = next((word for word in words if word in TOPICS), None)
    if command == "profile":
        print(PROFILE_HELP)
        return True
    print(format_help(command) if topic is None else format_engine_help(TOPICS[topic]))
    return True


def serve(words: list[str]) -> None:
    if _helps("serve", words):
        return
    from instep.arguments.parse import parse

    args = parse(words, "serve")
    from instep.checkpoints.hf_export import check_files, check_hf_checkpoint
    from instep.serve import serve

    check_hf_checkpoint(args.hf_checkpoint)
    check_files(args.hf_checkpoint, needs_chat_template=False)
    serve(args, next((front for make in added("before_engines") if (front := make(args)) is not None), None))


def report(words: list[str]) -> None:
    from instep.system.options import OptionParser

    parser = OptionParser("instep report", description="Write RUN_DIR/report.html from the run's metrics.")
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the --run-dir of a run")
    folder = parser.parse_args(words).folder
    if not (folder / "config.json").is_file():
        what = f"{folder} is not the folder of a run: it has no config.json"
        raise ConfigError(what, where="instep report", remedy="give the --run-dir of a run")
    from instep.observability.report import make_report

    print(make_report(folder))


def _import_from_here() -> None:
    """Allow hooks in modules of the current folder, in this process and all children, as with `python train.py`."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *(p for p in paths if p)])


def _terminate_like_interrupt() -> None:
    """Handle SIGTERM and SIGHUP (the terminal closed) like Ctrl-C: children end in order, and a report is written.

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
