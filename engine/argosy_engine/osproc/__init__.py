"""Processes of the operating system: children that end with their parent, debug signals, file descriptors. No torch."""
