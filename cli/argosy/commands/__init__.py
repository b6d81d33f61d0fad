"""The commands of `argosy`, one module each."""
