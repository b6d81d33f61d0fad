"""Reasoning parsers: the marks that families of models write around their reasoning, by vLLM's names."""
