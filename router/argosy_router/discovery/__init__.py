"""Discovery of replicas: fixed URLs, DNS, a watched file, or Kubernetes.

Owns: turning a source into `FleetSnapshot`s. Must not know: connections to replicas for requests, policies, health.
Invariant: a source that cannot be read changes nothing; the last snapshot stays in force.
"""

# Not compiled: runs when the fleet changes, not for each request.
