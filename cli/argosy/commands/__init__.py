"""One module for each command of the `argosy` table."""
