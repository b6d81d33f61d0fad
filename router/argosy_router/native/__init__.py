"""Functions and classes implemented in C if that was built (`argosy_router.compile`), and in Python otherwise.

Owns: the choice between the two. Both behave alike: `argosy_protocol.chunk_hash`, `native.estimate`, `native.ranking`
and `prefixes.table` document them, and tests compare them.
"""

# Not compiled: it has the substitutes of what is written in C.
