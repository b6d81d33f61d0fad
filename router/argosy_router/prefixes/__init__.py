"""Prefix index: which replica holds which prompt prefixes.

index             chunk hash -> slots of replicas, and prompt tokens
table             entries of an index in Python; `native` has the same in C
replica_prefixes  one replica's slots and speculative inserts
index_memory      division of memory among the indexes of several services
"""
