"""Logits processors: the interface, the built-in ones, and the isolation of custom ones."""
