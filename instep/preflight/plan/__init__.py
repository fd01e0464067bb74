"""Estimates of a run's memory and time before it starts. torch is needed only to measure a card."""
