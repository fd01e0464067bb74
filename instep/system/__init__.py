"""Processes, files, ports and memory of the operating system."""
