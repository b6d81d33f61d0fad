"""Faults, one module per part that fails; each has its list `FAULTS`."""
