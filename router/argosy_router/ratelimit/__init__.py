"""Rate limits: requests and tokens per minute and parallel requests of each key.

Must not know: keys, accounts, requests; time is passed in.

    key_limits    one key's limits, and what requests reserve of them
    token_bucket  limits per minute, and the `x-ratelimit-*` headers
"""
