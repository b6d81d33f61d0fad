"""Parsers of a chat model's output: reasoning, content and tool calls, one parser per family of models."""
