"""Why a service does not answer: the chain from the manifest until it is ready, and its first link that fails."""
