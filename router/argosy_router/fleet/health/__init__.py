"""Health of replicas: decides whether a replica is healthy, suspect, in cooldown or ejected.

Nothing else writes that state. Others report events: outlier detection how attempts ended, the telemetry client
heartbeats and silence, the poller of foreign replicas how polls ended.
Must not know: requests, telemetry frames, how a replica is chosen.

replica_health   state machine of one replica
ejection_limits  how many replicas of a service may be ejected
core_stall       how long a replica's engine core may be silent
"""
