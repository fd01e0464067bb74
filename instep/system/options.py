"""The command lines of small commands (`instep doctor`, `instep samples`, ...)."""

from __future__ import annotations

import argparse
from typing import NoReturn

from instep.errors import ConfigError


class OptionParser(argparse.ArgumentParser):
    """A parser that reports a wrong command line as a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where=self.prog, remedy=f"`{self.prog} --help` explains it")
