"""A model's folder: which files it has, whether they are whole, and how tensors are read from them. Must not know:
layers, what is computed with the tensors.
"""
