"""Decisions, as pure functions: the objects that should exist, and the changes that lead there."""
