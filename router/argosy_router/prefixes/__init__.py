"""Prefix index: which replica holds which prompt prefixes."""
