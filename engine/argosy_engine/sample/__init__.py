"""Turning logits into tokens: parameters, and the batched sampler."""
