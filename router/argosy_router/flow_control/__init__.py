"""Flow control in front of the services: admit a request now, queue it, or refuse it.

Owns: how many requests each service has admitted, and which ones are queued for it in which order.
Must not know: keys and rate limits, the bytes of requests and answers, how a replica is chosen.

    controller      all services: admission, ticks, bounds, metrics
    service_queue   one service: admit now, queue, or refuse
    fair_queue      the order: priorities, and fairness among accounts
    queued_request  a request in a queue
"""
