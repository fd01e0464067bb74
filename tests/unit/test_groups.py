import pytest


def test_the_groups_of_the_suite_act(request: pytest.FixtureRequest) -> None:
    """Where pytest-xdist does not fit pytest they fail to, silently, and each process makes all shared fixtures."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@test_groups")
