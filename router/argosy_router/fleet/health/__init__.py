"""Health of replicas: the one place that decides whether a replica is healthy, suspect, in cooldown or ejected.

Owns: that state, and the limits of ejection in a service. Others only report what they saw: outlier detection how
attempts ended, the telemetry client heartbeats and silence, the poller of foreign replicas how polls ended.
Must not know: requests, telemetry frames, how a replica is chosen.
"""
