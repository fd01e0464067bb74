"""The command line: flags, what follows from them, and what is wrong with them. It imports no torch."""
