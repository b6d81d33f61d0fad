"""Tool parsers: the forms in which families of models write tool calls, by vLLM's names."""
