"""The supervisor that ships, except that a rolling update soon counts a ready replica as available."""

import sys

from argosy.local import supervisor
from argosy.local.child_process import Settings

if __name__ == "__main__":
    sys.exit(supervisor.main(settings=Settings(min_ready_s=0.5)))
