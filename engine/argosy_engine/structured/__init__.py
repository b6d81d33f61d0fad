"""Structured outputs: the request parameters, and the grammars that constrain an output to them."""
