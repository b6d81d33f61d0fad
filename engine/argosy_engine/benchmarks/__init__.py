"""Benchmarks of a user's own: `argosy bench serve`, `throughput` and `latency`, with vLLM's flags and results."""
