"""Sampling: request parameters, logits processors, and the batched sampler that turns logits into tokens."""
