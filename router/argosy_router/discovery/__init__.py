"""Discovery of replicas: fixed URLs, DNS, a watched file, or Kubernetes.

Owns: turning a source into `FleetSnapshot`s. Must not know: connections to replicas for requests, policies, health.
Invariant: a source that cannot be read changes nothing; the last snapshot stays in force.

    source           interface between a source of replicas and the fleet
    static, dns      fixed addresses, and the addresses of host names
    model_discovery  asks replicas of both for their models
    file             fleet document on disk
    kubernetes       fleet document in a ConfigMap, and its pods
    pod_members      which pods are replicas, and of which service
    reflector        list and watch of a Kubernetes collection
"""

# Not compiled: runs when the fleet changes, not for each request.
