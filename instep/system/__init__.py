"""Processes, files, ports and memory, as the operating system has them."""
