"""Model architectures: the forward pass over flattened tokens, made of `layers` from a `checkpoint`. Our own by their
name in config.json (`registry`), any other decoder or encoder by transformers' modelling code. Must not know: the
scheduler, sampling.
"""
