"""`python -m argosy`: what the local fleet starts its engines and its router with."""

import sys

from argosy.main import main

sys.exit(main())
