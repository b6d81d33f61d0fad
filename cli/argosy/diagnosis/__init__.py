"""Why a service does not answer: the chain from the manifest to the first token, and its first link that fails."""
