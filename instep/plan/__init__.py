"""What a run needs of memory and time, said before anything is launched. Needs no torch but to measure a card."""
