"""The local fleet: one machine's processes made equal to manifests, with a supervisor in the operator's place."""
