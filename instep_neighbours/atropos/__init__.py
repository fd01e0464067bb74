"""Rollouts from Atropos' environments: the trainer's side of their API, and the API (docs/neighbours/atropos.md)."""

from instep_neighbours.atropos.groups import advantages, normalized_scores
from instep_neighbours.atropos.rollout import generate_rollout

__all__ = ["advantages", "generate_rollout", "normalized_scores"]
