"""The supervisor, with engines that have no model and delays that suit a test."""

import sys
from pathlib import Path

from argosy.local import control_server
from argosy.local.settings import Settings

ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))

if __name__ == "__main__":
    settings = Settings(engine=ENGINE, first_backoff_s=0.05, most_backoff_s=0.2, min_ready_s=2.0)
    sys.exit(control_server.main(settings=settings))
