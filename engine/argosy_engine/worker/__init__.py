"""The worker of one device: weights, KV cache tensor, and the runner that executes a scheduled step.

Must not know: the engine core, text, how it is run.
"""
