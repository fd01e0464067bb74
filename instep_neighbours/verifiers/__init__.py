"""Environments of the package `verifiers`, unmodified and token-exact (docs/neighbours/verifiers.md).

The environment runs in separate processes, in a Python that has it. It gets tasks and the address of the run's engines.
Its own client requests tokens from them. Its traces come back with the ids and log-probs of every turn, as the engine
returned them, and become samples. Nothing is tokenized again.
"""

from instep_neighbours.verifiers.rollout import Tasks, generate, generate_rollout

__all__ = ["Tasks", "generate", "generate_rollout"]
