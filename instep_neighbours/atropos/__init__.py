"""Rollouts from Atropos' environments: the trainer's side of their API, and the API (docs/neighbours/atropos.md)."""

from instep_neighbours.atropos.rollout import generate_rollout
from instep_neighbours.atropos.scores import advantages, normalized_scores

__all__ = ["advantages", "generate_rollout", "normalized_scores"]
