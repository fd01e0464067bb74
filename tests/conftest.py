import importlib.util
import signal
import zlib
from collections.abc import Iterator

import pytest

from instep.system import fork_server
from instep.system.importing import first_import
from tests import forks

# A shell that starts a command in the background lets it ignore SIGINT, and so would all that the tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)

forks.install()

# Fixtures that take seconds to make: the tests that share one run in one process of pytest-xdist, those of a file or,
# where the fixture is the session's, all of them.
SHARED = set("bad cluster computed dumped engine finished golden planted run_ranks served stack trained".split())
SHARED |= {"planted_lora", "planted_vllm", "prepared", "planted_sglang", "planted_sglang_two", "planted_sglang_lora"}
OF_SESSION = {"engine"}
LONG = {
    "test_tool_use",
    "test_bf16_gap",
    "test_atropos_trainer",
    "test_quickstart",
}  # minutes: no core waits at the end
# What tests with a mark need, and how it gets here.
NEEDED = {"vllm": ("vllm",), "router": ("vllm_router",), "sglang": ("sglang",), "sglang_router": ("sglang_router",)}
MISSING = {mark: [name for name in names if importlib.util.find_spec(name) is None] for mark, names in NEEDED.items()}


def pytest_unconfigure() -> None:
    for server in forks.SERVERS:
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No `conftest.py` imports torch: the process that hands the tests to others does not collect them."""
    with first_import("torch"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What a test with vLLM or SGLang starts, its fixtures included, is forked from a process that has imported it."""
    of_mark = next((server for mark, server in forks.OF_MARKS.items() if item.get_closest_marker(mark)), None)
    with forks.using(of_mark or fork_server.current):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: by shared fixture, unit tests by file; any other test goes where there is room.

    Tests that join a Ray cluster come first: Ray reads its environment when a process imports it, once. Files of unit
    tests are mixed among the others: some wait, some compute, and side by side they leave no core idle.
    """
    others = [item for item in items if "unit" not in item.path.parts]
    places = {item: place / len(others) for place, item in enumerate(others)}
    places |= {item: -1.0 for item in others if item.path.stem in LONG and item.get_closest_marker("slow")}
    places |= {item: -2.0 for item in others if "cluster" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: places[item] if item in places else zlib.crc32(item.path.name.encode()) / 2**32)
    for item in items:
        for mark, names in MISSING.items():
            if names and item.get_closest_marker(mark):
                how = f"instep install {'sglang' if mark.startswith('sglang') else 'vllm'}"
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(names)}: not installed ({how})"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        names = [f"{name} {params.get(name, '')}" for name in sorted(SHARED.intersection(item.fixturenames))]
        if names or "unit" in item.path.parts:
            room = "" if OF_SESSION.intersection(item.fixturenames) else item.path.stem
            item.add_marker(pytest.mark.xdist_group(" ".join(filter(None, [room, *names[:1]]))))
