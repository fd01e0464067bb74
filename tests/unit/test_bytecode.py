"""Bytecode of packages that were installed without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Another process, which imports nothing of instep, inherits it.
CHILD = "import big, json, sys; print(json.dumps([big.__cached__, sys.dont_write_bytecode]))"
PROCESS = f"""
import subprocess, sys
from instep.system.bytecode import keep_bytecode
print(keep_bytecode(["absent", "big"]) or "-", flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.fixture
def big(tmp_path):
    (tmp_path / "site" / "big").mkdir(parents=True)
    (tmp_path / "site" / "big" / "__init__.py").write_text("x = 1\n")
    return tmp_path / "site" / "big"


def start(big, **more):
    """What `keep_bytecode` returned, where a child looks for the package's bytecode, and whether it writes none."""
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{big.parent}", "XDG_CACHE_HOME": str(big.parents[1] / "cache"), **more}
    words = [sys.executable, "-c", PROCESS]
    lines = subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return lines[0], *json.loads(lines[1])


def test_children_keep_bytecode_in_the_users_cache_where_python_would_write_none(big):
    folder, cached, writes_none = start(big, PYTHONDONTWRITEBYTECODE="1")
    assert folder == str(big.parents[1] / "cache" / "instep" / "bytecode") and not writes_none
    assert cached.startswith(folder) and Path(cached).exists() and not (big / "__pycache__").exists()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert start(big, PYTHONDONTWRITEBYTECODE="1") == (folder, cached, False)  # the second run finds it


def test_python_goes_on_as_before_where_it_has_bytecode_or_may_write_it(big):
    beside = str(big / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc")
    assert start(big) == ("-", beside, False) and Path(beside).exists()
    assert start(big, PYTHONDONTWRITEBYTECODE="1") == ("-", beside, True)


def test_a_folder_that_the_user_names_stays(big, tmp_path):
    folder, cached, writes_none = start(big, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(tmp_path / "mine"))
    assert folder == "-" and cached.startswith(str(tmp_path / "mine")) and writes_none


def test_no_bytecode_is_taken_from_a_folder_that_others_may_write_to(big):
    folder = big.parents[1] / "cache" / "instep" / "bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert start(big, PYTHONDONTWRITEBYTECODE="1")[0] == "-"
