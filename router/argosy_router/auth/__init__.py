"""Authentication: which account a client's key belongs to, and what that account may ask for.

Must not know: sockets, HTTP, replicas, queues; time is passed in.
"""
