"""The local fleet: a supervisor that takes the operator's place, and runs what manifests declare as processes."""
