"""The custom resource `InferenceService`, as the operator and a local fleet both use it.

Owns what a user may declare, the CRD made from it, its validation, and what follows from a manifest without a cluster:
the engine's command line, the routers' fleet document and the rollout policy.
Must not know: pods, API clients, processes. Everything here is a pure function of the resource.
"""
