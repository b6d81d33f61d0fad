"""The engine's flags as data, for those who must not import the engine: the custom resource and the operator."""
