"""All faults and scenarios. `docs/faults.md` is made from them (see `document.py`)."""

from tests.faults import process_faults  # noqa: I001 - the order of the document
from tests.faults import data_faults
from tests.faults.registry import FAULTS, SCENARIOS, SLOW

__all__ = ["FAULTS", "SCENARIOS", "SLOW", "data_faults", "process_faults"]
