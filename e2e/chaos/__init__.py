"""Faults against the real operator on a real API server, without nodes.

`make chaos` starts etcd, the API server, the controller manager and the scheduler on loopback addresses, the operator
as the chart starts it, and stand-ins for the kubelets and for a router. `make scale` measures a large fleet there.
"""
