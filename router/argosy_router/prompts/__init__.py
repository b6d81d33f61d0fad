"""A request's prompt as routing sees it: chunk hashes, and an estimate of its length in tokens.

Must not know: replicas, indexes, HTTP.
"""
