"""What users' functions import from slime and vime, or name in a flag, and where instep has it."""

from __future__ import annotations

import tomllib
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))
SLIME = {name: (here, what) for name, (here, what) in _TABLE.items()}
MODULES = {name.replace("slime.", "vime.", 1): here for name, here in SLIME.items()} | SLIME
