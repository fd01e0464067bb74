import gc

import pytest

from instep.importing import without_collections


def test_nothing_is_collected_in_the_block_and_what_it_made_is_not_looked_through_again():
    before = gc.get_freeze_count()
    collections = [generation["collections"] for generation in gc.get_stats()]
    try:
        with without_collections():
            made = [[] for _ in range(10_000)]  # a dozen collections with Python's thresholds
            assert not gc.isenabled()
            assert [generation["collections"] for generation in gc.get_stats()] == collections
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_collections_that_were_off_or_an_import_that_fails_leave_them_as_they_were():
    try:
        with pytest.raises(ModuleNotFoundError), without_collections():
            import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        assert gc.isenabled()
        gc.disable()
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
