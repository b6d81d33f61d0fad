"""Rate limits: requests and tokens per minute, as token buckets.

Must not know: keys, accounts, requests; time is passed in.
"""
