"""Sizing: how many KV blocks fit beside a model. No torch, so that core, worker and `argosy doctor` agree."""
