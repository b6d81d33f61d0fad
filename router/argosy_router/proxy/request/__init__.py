"""The client's request: decoding, checks, and what is rewritten before an engine gets it.

Owns: `Call`, the decoded request, and what follows from its content alone.
Must not know: attempts, retries, how a replica is chosen.
"""
