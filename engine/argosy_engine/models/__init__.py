"""Model architectures: configuration, weights, and the forward pass over flattened tokens."""
