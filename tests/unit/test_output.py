"""Stdout that nobody takes any more: what is printed goes on in a file, and nothing raises."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
from rich.console import Console
from instep.observability.output import lasting_output, lost_output
with lasting_output(Path(sys.argv[1])):
    console = Console()
    for i in range(200):
        console.print(f"line {i} " + "x" * 500)
        print(f"print {i}")
    Path(sys.argv[2]).write_text("\\n".join(lost_output))
print("after")
"""


def printed(tmp_path, stdout, **more):
    """What a program that prints 400 lines leaves in the folder, with its exit code and stderr."""
    command = [sys.executable, "-c", CODE, str(tmp_path / "logs"), str(tmp_path / "said")]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, **more)
    path = tmp_path / "logs" / "stdout.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return done.returncode, done.stderr, lines, (tmp_path / "said").read_text()


def first_line(code, stderr, lines, said):
    """How the file begins that has all that was printed."""
    assert code == 0, stderr
    assert lines[-1] == "after"  # also what is printed when the block has ended
    text = "\n".join(lines)
    assert [i for i in range(199) if f"line {i + 1} " not in text or f"print {i + 1}\n" not in text] == []
    assert stderr.count("\n") == 1 and stderr.endswith("logs/stdout.txt; the run goes on\n"), stderr
    assert said.startswith("stdout was lost") and said.endswith("logs/stdout.txt") and "Traceback" not in stderr
    return lines[0]


def test_a_pipe_whose_reader_ended(tmp_path):
    read, write = os.pipe()
    os.close(read)
    try:
        assert first_line(*printed(tmp_path, write)).startswith("stdout was lost (Broken pipe) at ")
    finally:
        os.close(write)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_it(tmp_path):
    with open("/dev/full", "w") as full:
        assert first_line(*printed(tmp_path, full)).startswith("stdout was lost (No space left on device) at ")


def test_neither_the_pipe_nor_the_folder_can_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with open("/dev/full", "w") as full:
        code = subprocess.run(
            [sys.executable, "-c", CODE, str(tmp_path / "logs"), str(tmp_path / "said")],
            stdout=full,
            stderr=full,
            timeout=60,
        ).returncode
    said = (tmp_path / "said").read_text().splitlines()
    assert code == 0 and len(said) == 2 and all(line.endswith("is in /dev/null") for line in said), said


def test_nothing_changes_where_stdout_is_well(tmp_path):
    code, stderr, lines, said = printed(tmp_path, subprocess.DEVNULL)
    assert (code, stderr, lines, said) == (0, "", [], "")


@pytest.mark.parametrize("words, code", [("plan --help", 141), ("plan --actor-num-gpus-per-node 8", 1)])  # rich: 1
def test_a_command_that_prints_ends_quietly_with_the_reader_of_its_pipe(words, code):
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "instep.cli", *words.split()]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_broken_pipe_that_is_not_stdout_is_an_error():
    code = "import sys; from instep.cli import guarded\ndef work(): raise BrokenPipeError\nsys.exit(guarded(work))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr
