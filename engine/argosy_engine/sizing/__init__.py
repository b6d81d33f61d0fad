"""Sizing: what memory the device has, what a model needs of it, and how many KV blocks fit. No torch."""
