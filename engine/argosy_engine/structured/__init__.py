"""Structured outputs: what a request may ask its output to look like, and the grammars that make it so."""
