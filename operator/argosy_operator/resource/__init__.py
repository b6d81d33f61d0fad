"""The custom resource: what a user may declare, the CRD made from it, and its validation."""
