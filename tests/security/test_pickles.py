"""Thousands of hostile pickles are each refused, or read as the data that they are, and nothing else happens."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from instep.checkpoints import safe_pickle
from instep.checkpoints.safe_pickle import Made, NoData


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("was here",), {"a": 1}


def test_what_a_pickle_would_make_is_kept_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    made = safe_pickle.read(pickle.dumps({"evil": Evil(), "list": [1, (2.5, None)]}))
    assert made["list"] == [1, (2.5, None)] and isinstance(made["evil"], Made)
    assert (made["evil"].of, made["evil"].args, made["evil"].state) == ("builtins.print", ("was here",), {"a": 1})
    assert capsys.readouterr().out == ""
    with pytest.raises(NoData):  # BUILD on a class, which would change it
        safe_pickle.read(b"\x80\4cbuiltins\nprint\nN}X\1\0\0\0aK\1s\x86b.")


@pytest.mark.parametrize(
    ("every", "refused"), [((7, 29), (3_700, 690)), pytest.param((2, 10), (13_000, 2_000), marks=pytest.mark.slow)]
)
def test_nothing_runs_opens_or_changes_while_they_are_read(
    tmp_path: Path, every: tuple[int, int], refused: tuple[int, int]
) -> None:
    """Of the pickles of an index every so many, and of those in a file."""
    words = [sys.executable, "-m", "tests.security.read_hostile", str(tmp_path), *map(str, every)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["events"] == [] and found["changed"] == []
    assert set(found["ends"]) == {"index read", "index refused", "file read", "file refused"}, found["ends"]
    assert found["ends"]["index refused"] > refused[0] and found["ends"]["file refused"] > refused[1]
    assert found["megabytes"] < 300
