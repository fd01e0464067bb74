"""The arguments of the algorithm: flags, values that follow from them, and combinations that are refused."""
