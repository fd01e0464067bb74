"""The settings of a run by concern, as types: a signature says what a function reads of the arguments.

`settings.pyi` has them, for type checkers. At run time a name of this module is only a name.
"""


def __getattr__(name: str) -> type:
    return object
