"""Request accounting: what is counted, logged and billed of each request.

Must not know: exchanges, connections, how a replica is chosen.

outcome             the record of one request that all accounting reads
request_accounting  metrics, access log, usage and traces
rate_limit_charges  tokens reserved of a key's rate limits, and their settlement
"""
