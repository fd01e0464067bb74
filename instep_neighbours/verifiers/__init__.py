"""Environments of the package `verifiers`, run unmodified and token-exact (docs/neighbours/verifiers.md).

The environment runs in processes of its own, in a Python that has it. It gets tasks and the address of the run's
engines, which its own client asks for tokens; its traces come back with the ids and log-probs of every turn, as the
engine gave them, and become samples. Nothing is tokenized again.
"""

from instep_neighbours.verifiers.rollout import Tasks, generate, generate_rollout

__all__ = ["Tasks", "generate", "generate_rollout"]
