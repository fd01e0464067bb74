"""`python -m tests.faults.document` runs the suite and writes docs/faults.md with what it measured.

With names of scenarios it runs only those, prints their rows, and puts them into the place of the former ones. A
scenario that fails is tried once more, alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.harness import Place, Result

NUM_AT_ONCE = 2
PATH = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = """\
# Faults

What happens when something goes wrong, made and measured by `python -m tests.faults.document`. It runs the fault
suite (`tests/faults/`, a part of it in `make test`): each fault is made in a real run of a tiny model on a CPU (GRPO,
4 prompts, 4 responses of at most 16 tokens each), with all its processes, two runs at a time on one machine. A fault
that has changed or is new is measured by itself, so that the rows are of several days and versions, and the machine
had other work at some of them. Every timeout has its default where the row names no flag. A run recovers, or it ends
with one error that says what happened, where, and what to do; no process of it is left and no complete checkpoint is
lost. The suite requires the end within 10 s of a fault that comes while the command runs (where the row names no
other bound). One that was there before counts from the command's start, most of which is Python's imports beside
another run, and has 40 s. Where other tests run beside, a bound is longer by the machine's load per core. An error has
three parts (what, where, remedy); the table shows the first. Engines are embedded ones where it does not say vLLM.

"Seconds" are counted from the fault until the command has ended with all its processes; a recovered one until the next
training step is done, or the command has ended.

| fault | outcome | seconds | what you see |
|---|---|---|---|
"""
FOOT = """
While a call to a worker or an engine waits, and while a rollout runs, the controller looks at all its processes every
0.2 s. A process that has ended is known at once; one that is stopped (SIGSTOP), after 3 s; one that sends no heartbeat,
after `--heartbeat-timeout`, and so does an embedded engine whose HTTP process sends none. The time between two looks
counts as one second at most: a run that is stopped as a whole and goes on (SLURM suspends jobs so) raises no such
alarm. vLLM's core sends no heartbeat: it is asked a question all the time, and hangs if it has answered none for five
times `--heartbeat-timeout` (5 minutes by default) while no control call keeps it busy.
One of several engines is restarted then, as if it had died. Every call has a bound of its own as well
(`--train-timeout`, `--sync-timeout`, `--rollout-timeout`, `--reward-timeout`); when that of a worker expires, the
stacks of all ranks are in the error.
"""


def document(faults: dict[str, tuple[str, str]], rows: dict[str, str]) -> str:
    return HEAD + "".join(rows[what] for what, _ in faults.values()) + FOOT


def rows_of(text: str) -> dict[str, str]:
    """The rows of the table by their faults."""
    return {line.split(" | ")[0].removeprefix("| "): line + "\n" for line in text.splitlines() if line[:2] == "| "}


def row(what: str, outcome: str, result: Result) -> str:
    seen = f"`{result.seen}`" if outcome == "error" else result.seen
    return f"| {what} | {outcome} | {result.seconds:.1f} | {seen.replace('|', '/')} |\n"


def documented(text: str) -> list[tuple[str, str]]:
    """Fault and outcome of the table's rows."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return [(row[0].removeprefix("| "), row[1]) for row in rows]


def main() -> None:
    from tests.faults.conftest import prepare
    from tests.faults.suite import FAULTS, SCENARIOS, VLLM

    longest_first = sorted(SCENARIOS, key=lambda name: name not in VLLM and name != "ray_nodes")
    wanted = sys.argv[1:] or longest_first
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="instep-faults-") as root:
        prepared = prepare(Path(root) / "prepared")

        def work(name: str, attempt: int = 0) -> dict[str, Result] | Exception:
            place = Place(*prepared, Path(root) / f"{name}-{attempt}")
            place.folder.mkdir()
            began = time.monotonic()
            try:
                SCENARIOS[name](place)
                outcome: dict[str, Result] | Exception = place.results
            except Exception as error:  # noqa: BLE001 - one scenario's fault is not the end of the others
                outcome = error
            said = "failed" if isinstance(outcome, Exception) else "took"
            print(f"{name} {said} {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            return outcome

        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            outcomes = dict(zip(wanted, pool.map(work, wanted), strict=True))
        for name in [name for name, outcome in outcomes.items() if isinstance(outcome, Exception)]:
            outcomes[name] = work(name, attempt=1)
    print(f"all of it took {time.monotonic() - started:.0f} s", file=sys.stderr)
    failed = [f"{name}: {error!r}" for name, error in outcomes.items() if isinstance(error, Exception)]
    results = {fault: x for found in outcomes.values() if isinstance(found, dict) for fault, x in found.items()}
    new = {FAULTS[fault][0]: row(*FAULTS[fault], result) for fault, result in results.items()}
    if sys.argv[1:]:
        print("".join(new.values()))
    if failed:
        sys.exit("\n\n".join([*failed, f"{len(failed)} scenarios failed, {PATH} is as it was"]))
    PATH.write_text(document(FAULTS, new if not sys.argv[1:] else rows_of(PATH.read_text()) | new))


if __name__ == "__main__":
    main()
