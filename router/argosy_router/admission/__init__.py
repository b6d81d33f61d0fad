"""Authentication and rate limits: who may ask, for what, and how much.

Owns: API keys and their terms, accounts, rate limits.
Must not know: sockets, HTTP, replicas, queues; time is passed in.

    keys      API key -> account
    key_file  the file the keys are read from
    terms     what the file says of a key
    accounts  an account's models, priority and reservations
    limits    token buckets of one account
"""
