"""The arguments of what is optimized: flags, what follows from them, and which of them do not go together."""
