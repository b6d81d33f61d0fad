"""Functions and classes that are written in C and in Python; a compiled router uses the C.

Owns: the choice between the two. Both behave alike: `argosy_protocol.chunk_hash`, `native.chunk_tokens`,
`native.ranking` and `prefixes.table` document them, and tests compare them.
"""

# Not compiled: it has the substitutes of what is written in C.
