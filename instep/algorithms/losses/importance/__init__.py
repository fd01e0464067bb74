"""Corrections of the gap between the engine that sampled and the trainer that scores."""
