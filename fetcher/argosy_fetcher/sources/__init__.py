"""Sources of models: one module per kind, which knows addresses, credentials and protocol, and nothing of stores."""
