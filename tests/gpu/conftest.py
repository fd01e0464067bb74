"""A failure is told at once: a run on a GPU host that is lent for minutes may be ended before pytest sums up."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        told = f"\n{report.nodeid} has failed in its {report.when}:\n{report.longreprtext}\n{report.capstdout}"
        item.config.get_terminal_writer().line(told)
    return report
