"""Hashing and the prefix index's table in C, with substitutes in Python, and the choice between the two."""

# Not compiled: it has the substitutes of what is written in C.
