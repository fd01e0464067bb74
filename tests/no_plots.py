"""Importing this leaves the plots out of reports: they are two fifths of what a tiny run computes.

Runs that are forked in the tests do without (`tests/forks.py`); `tests/unit/test_report.py` and the quickstart draw
them.
"""

from instep.observability import report

report.PLOTS = {}
