"""The worker of one device: weights, KV cache tensor, and the runner that executes a scheduled step."""
