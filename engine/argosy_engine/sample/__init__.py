"""Sampling: logits processors, and the batched sampler that turns logits into tokens."""
