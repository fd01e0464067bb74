"""Corrections of the gap between the sampling engine and the scoring trainer."""
