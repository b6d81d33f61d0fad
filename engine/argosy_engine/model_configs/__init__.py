"""What config.json says about a model, as far as it determines the computation. No torch. Must not know: weights,
layers.
"""
