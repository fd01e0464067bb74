"""Real tokenizers and models, which `python -m tests.real.fetch` has brought; without it the tests here are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep.data.tokenizer import load_tokenizer
from tests.real.conversion import CONVERSIONS
from tests.real.fetch import PACKAGES, folder_of
from tests.real.folders import make_folder


@pytest.fixture(scope="session", params=CONVERSIONS)
def name(request: pytest.FixtureRequest) -> str:
    """Of a real tokenizer."""
    if not all(folder_of(package).is_dir() for package in PACKAGES):
        pytest.skip("make test-real fetches real tokenizers")
    return str(request.param)


@pytest.fixture(scope="session")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny random model with it."""
    return make_folder(name, tmp_path_factory.mktemp(name) / "hf")


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder), False)
