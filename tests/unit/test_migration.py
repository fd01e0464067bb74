"""docs/migration.md: made from the tables, and the tables are true of the flags they name."""

import re
from pathlib import Path

import pytest

from instep.arguments.all_flags import find, own_flags
from instep.system.hooks import load_function
from instep.system.hooks.aliases import instep_hook
from instep_neighbours.settings import OPENRLHF, TRL, TRL_DPO, VERL
from instep_neighbours.slime import SLIME as MODULES
from scripts.docs.migration import markdown

ROWS = [*TRL, *TRL_DPO, *VERL, *OPENRLHF]


def test_docs_are_made_from_the_tables():
    path = Path(__file__).parents[2] / "docs/migration.md"
    assert path.read_text() == markdown(), "python scripts/docs/migration.py > docs/migration.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_named_flag_exists_and_has_the_stated_status(row):
    flags = [find(name) for name in row.flags]
    assert None not in flags, row.here
    assert row.here or row.note
    if row.here:
        assert all(flag.status in (row.status, "acts") for flag in flags)
    assert row.status != "refused", "name a flag that acts, or that comes later"
    assert "refused" not in {find(name).status for name in row.flags}


def test_all_flags_of_slime_and_vime_that_do_not_act_are_listed():
    rows = [line for line in markdown().partition("## TRL")[0].splitlines() if line.startswith("| `--")]
    status = {name: row.split(" | ")[1] for row in rows for name in re.findall("`(--.*?)`", row.split(" | ")[0])}
    for flag in own_flags().values():
        if set(flag.whose) & set("VRSC"):
            assert status.get(flag.name, "acts") == flag.status, flag.name


@pytest.mark.parametrize("theirs", MODULES)
def test_what_hooks_of_slime_import_is_there(theirs):
    module, names = MODULES[theirs]
    for name in names.split():
        assert load_function(f"{module}.{name}") is not None
        assert instep_hook(f"{theirs}.{name}") == f"{module}.{name}"
    assert instep_hook(f"{theirs}.something_else") == ""
