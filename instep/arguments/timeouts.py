"""The bounds of waits, in seconds. The error of a bound that has expired names the process that was waited for."""

from instep.arguments.flag import read_flags

TIMEOUTS = read_flags(__file__)
