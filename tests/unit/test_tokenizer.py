"""The tokenizer of a checkpoint."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

from instep.data import tokenizer


def test_two_threads_that_need_a_tokenizer_first_do_not_import_it_at_once(tmp_path, monkeypatch) -> None:
    """As the thread of a rollout ahead and the controller's do after a resume; a module in the place of transformers
    finds its names as that one does, and fails where two ask at once."""
    busy, module = threading.Lock(), ModuleType("transformers")

    def find(name: str) -> object:
        if name != "AutoTokenizer" or not busy.acquire(blocking=False):
            raise AttributeError(name)
        time.sleep(0.2)
        busy.release()
        return SimpleNamespace(from_pretrained=lambda path, **_: f"of {path}")

    module.__getattr__ = find  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "transformers", module)
    paths = [str(tmp_path / name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda path: tokenizer.load_tokenizer(path, False), paths))
    assert found == [f"of {path}" for path in paths]
