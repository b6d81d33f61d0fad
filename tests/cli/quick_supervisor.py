"""The supervisor that ships, except that a rolling update soon counts a ready replica as available."""

import sys

from argosy.local import control_server
from argosy.local.settings import Settings

if __name__ == "__main__":
    sys.exit(control_server.main(settings=Settings(min_ready_s=0.5)))
