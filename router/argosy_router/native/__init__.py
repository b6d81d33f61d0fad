"""What is done in C where that was built (`argosy_router.compile`), and in Python elsewhere.

Owns: which of the two is used. Both are the same to whoever calls them: `argosy_protocol.chunks`,
`native.estimate`, `native.ranking` and `prefixes.table` say what they do, and tests hold them against each other.
"""
