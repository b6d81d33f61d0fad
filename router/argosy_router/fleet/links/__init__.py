"""Links to replicas: what keeps the router's knowledge of each replica up to date.

Must not know: clients' requests, policies, other replicas.

telemetry_client  the telemetry stream of an Argosy engine
foreign_poller    polls of an engine of another make
engine_metrics    load figures in such an engine's metrics
telemetry_budget  what the telemetry of a replica, a service and all may cost
reported_figures  bounds of what replicas say of themselves
"""
