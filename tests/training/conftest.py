"""Makes training/ importable, as it is for the scripts in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
