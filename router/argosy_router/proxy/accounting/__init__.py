"""What is accounted for: each request's outcome, its metrics, log lines and usage, and its rate-limit reservation.

Must not know: exchanges, connections, how a replica is chosen.
"""
