"""A small engine served in a process of its own, for `processes.running`."""

from __future__ import annotations

SERVE_TINY = ["argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--device", "cpu"]
SECRET = "xylophone quartz"
"""Words of `FOREVER` that no log may contain."""
FOREVER = {"prompt": f"Tell me of the {SECRET}", "max_tokens": 4000, "ignore_eos": True, "stream": True}
"""Body of a completion that streams for longer than any test runs."""
