"""Whether a run will work here: `instep plan`, `instep doctor`, and the checks of a run's inputs before it starts."""
