"""The Kubernetes operator for InferenceServices. `main` starts it."""
