"""Simulation of request traces on the router's own routing code, in simulated time.

Owns: trace files, a synthetic trace, a model of an engine, and the figures that compare policies.
Must not know: sockets, clocks. Service, index, replica load and policies are the production code; only engines and time
are simulated.

    trace             trace files (Mooncake's format), and a synthetic trace
    simulated_engine  queue, cache and speed of one engine
    simulator         some routers and their engines, event by event
    scaling           the same while replicas come and go
    policy_report     figures and table that compare policies
"""

# Not compiled: a simulator, which is no part of a running router.
