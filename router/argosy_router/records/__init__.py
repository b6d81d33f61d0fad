"""What is written down of requests: access lines, usage, traces, recordings."""
