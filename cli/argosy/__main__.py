"""`python -m argosy`, with which the local fleet starts its engines and its router."""

import sys

from argosy.main import main

sys.exit(main())
