"""Retries, migrations, hedging and outlier detection: what follows when attempts fail or are slow.

Must not know: the bytes of requests and answers, connections.

retry_state        whether a request is retried or migrated: every condition for it
retry_budget       how many retries a service may send
fault_attribution  whether the request or a replica is at fault for an error
outlier_detection  what ended attempts tell the replicas' health
hedging            when a stream is overdue, and how many may be hedged
"""
