"""Mixed attacks on a local fleet while ordinary clients must be unaffected (`make attack`, see README.md)."""
