"""Sizing: how many KV blocks fit beside a model. No torch, so that core, worker and `argosy doctor` agree.

device           memory and features of the device
kv_cache_sizing  estimates of weights and activations, and the plan of the memory
"""
