"""What a run needs of memory, said before anything is launched. Needs no torch."""
