"""The supervisor, with engines that have no model and delays that suit a test.

FAKE_MIN_READY_S is how long a replica must have been ready before a rolling update counts it as available.
"""

import os
import sys
from pathlib import Path

from argosy.local import supervisor
from argosy.local.child_process import Settings

ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))

if __name__ == "__main__":
    min_ready_s = float(os.environ.get("FAKE_MIN_READY_S", "0.3"))
    settings = Settings(engine=ENGINE, first_backoff_s=0.05, most_backoff_s=0.2, min_ready_s=min_ready_s)
    sys.exit(supervisor.main(settings=settings))
