"""Functions by dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.errors import ConfigError
from instep.system.hooks import load_function


def test_load_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_hooks_ok.py").write_text("VALUE = 3\ndef f(): return 4\n")
    (tmp_path / "my_hooks_dep.py").write_text("import not_installed_dep\n")
    (tmp_path / "my_hooks_raise.py").write_text("1 / 0\n")
    assert load_function("my_hooks_ok.f")() == 4 and load_function("my_hooks_ok.f") is load_function("my_hooks_ok.f")
    for path, what in (
        ("my_hooks_ok.g", "has no 'g'"),
        ("my_hooks_ok.VALUE", "is a int, not a function"),
        ("my_hooks_none.f", "'my_hooks_none' not found"),
        ("my_hooks_ok.sub.f", "not found"),
        ("my_hooks_dep.f", "imports 'not_installed_dep'"),
        ("my_hooks_raise.f", "ZeroDivisionError"),
        ("my_hooks_ok.py:f", "not a dotted path"),
        ("f", "not a dotted path"),
    ):
        with pytest.raises(ConfigError) as error:
            load_function(path)
        assert what in error.value.what and error.value.remedy, path
