"""What models are made of: layers, how their weights are loaded, divided and quantised, and what computes them. Must
not know: architectures, the scheduler, sampling.
"""
