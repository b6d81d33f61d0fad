"""Authentication: which account a client's key belongs to, and what that account may ask for.

Owns: API keys and their terms, accounts.
Must not know: sockets, HTTP, replicas, queues; time is passed in.

    key_table  API key -> account
    key_file   the file that the keys are read from
    key_terms  the terms of a key in that file
    accounts   an account's models, priority, cache and limits
"""
