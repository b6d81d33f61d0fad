"""Decisions, as pure functions: what should be there, and what has to change."""
