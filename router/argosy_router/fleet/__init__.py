"""The replicas behind the router: membership, load, health and cached prefixes of each.

Must not know: clients' requests, how HTTP is served.

fleet           all services, kept equal to discovery's latest snapshot
service         one service: its replicas, its prefix index, and the choice of a replica
candidates      the replicas that a request may be sent to now
capacity        how many more sequences they can take
replica         one replica
demand          times to first token of a service, for the operator's autoscaler
cache_value     what a replica's cache has saved of late
replica_key     the bearer key that a replica gets, while the fleet key is rotated
key_rotation    follows the fleet key, and moves replicas to the newest
replica_load    queued tokens, requests and rates of a replica
health          healthy, suspect, in cooldown or ejected
links           telemetry and polling, which keep replicas up to date
replica_errors  errors that telemetry tells of
"""
