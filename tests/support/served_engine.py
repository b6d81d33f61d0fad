"""A small engine served in a process of its own, for `processes.running`, and the one that tests share.

Tests that only send requests share `tiny_server`, a fixture of tests/engine/conftest.py: one server for each process
that runs tests. They use prompts of their own where it matters what is cached, compare counters with those before, end
what they began, and leave the server awake.
"""

from __future__ import annotations

SERVE_TINY = ["argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--device", "cpu"]
SECRET = "xylophone quartz"
"""Words of `FOREVER` that no log may contain."""
FOREVER = {"prompt": f"Tell me of the {SECRET}", "max_tokens": 4000, "ignore_eos": True, "stream": True}
"""Body of a completion that streams for longer than any test runs."""

KEY, OTHER_KEY, ADMIN_KEY = "test-key", "another-key", "admin-key"
"""API keys of the shared server."""
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
MAX_MODEL_LEN = 4096
"""Of the shared server."""
SHARED = [*SERVE_TINY, "--dtype", "float32", "--served-model-name", "tiny", "alias", "--hf-overrides"]
SHARED += ['{"is_matryoshka": true}']
"""The command line of the shared server. Requests may ask for shorter embeddings."""
SHARED_ENV = {"ARGOSY_API_KEY": f"{KEY},{OTHER_KEY}", "ARGOSY_ADMIN_API_KEY": ADMIN_KEY}
