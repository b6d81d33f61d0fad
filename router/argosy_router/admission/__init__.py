"""Who may ask, how much, and in which order when there is more to do than replicas can take.

Owns: API keys and their terms, rate limits, the fair queue in front of a service, the prediction of its drain.
Must not know: sockets, HTTP, replicas; time is passed in.

    keys      a key's text -> account                   (who)
    terms     what stands behind a key
    accounts  models, priority, reservations            (what)
    limits    token buckets per account                 (how much)
    entry     a request that waits
    queue     priorities, and fairness among accounts   (in which order)
    lane      one service: admit now, queue, or refuse  (when)
"""
