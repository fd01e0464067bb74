__version__ = "0.1.0"

from instep.api import Run, train

__all__ = ["Run", "__version__", "train"]
