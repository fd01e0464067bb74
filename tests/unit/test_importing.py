import gc

import pytest

from instep.system.importing import first_import


def collections():
    return [generation["collections"] for generation in gc.get_stats()]


def test_nothing_is_collected_in_the_block_and_what_it_made_is_not_looked_through_again():
    before = gc.get_freeze_count()
    try:
        with first_import("no_such_module"):
            begun = collections()
            made = [[] for _ in range(10_000)]  # a dozen collections with Python's thresholds
            assert not gc.isenabled() and collections() == begun
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_a_module_that_is_there_changes_nothing():
    before = gc.get_freeze_count()
    with first_import("pytest"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_collections_that_were_off_stay_so_and_an_import_that_fails_turns_them_on_again():
    try:
        with pytest.raises(ModuleNotFoundError), first_import("no_such_module"):
            import no_such_module  # noqa: F401
        assert gc.isenabled()
        gc.disable()
        with first_import("no_such_module"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
