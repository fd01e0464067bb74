"""A sandbox for code that a model has written: for tools, and for rewards that run code."""

from instep.rollout.sandbox.run import Limits, Outcome, check_sandbox, run_python

__all__ = ["Limits", "Outcome", "check_sandbox", "run_python"]
