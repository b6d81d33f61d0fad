"""Sizing: how many KV blocks fit beside a model. No torch, so that core, worker and `argosy doctor` agree.

device           memory and features of the device
rank_resources   share of a data-parallel rank in GPUs, cores and memory
kv_cache_sizing  estimates of weights and activations, and the plan of the memory
"""
