"""The `argosy` command and the local fleet."""
