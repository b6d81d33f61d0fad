"""Seeded synthetic conversations: what the tiny model is trained and measured on.

Every reply is a function of its prompt, so that greedy exact match is a fair measure. Nothing here
knows about tensors; `render` alone knows the chat template's text.
"""
