"""Full collections of a process with many objects, tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, itertools, weakref
from argosy_protocol.program.process import FREEZES_UNTIL_ALL, ShortCollections

class Node:
    pass

gc.disable()
gc.collect()
seconds = itertools.count()  # each collection takes one
short = ShortCollections({clock})
short.__enter__()
kept = Node()
kept.itself, dead = kept, weakref.ref(kept)
gc.collect(1)
assert gc.get_freeze_count() == 0, "young objects only"
gc.collect()
print(gc.get_freeze_count() > 1000)
del kept
for _ in range(FREEZES_UNTIL_ALL - 1):
    gc.collect()
print(dead() is None)
gc.collect()
assert gc.get_freeze_count() == 0
gc.collect()
print(dead() is None, gc.get_freeze_count() > 1000)
short.__exit__()
gc.unfreeze()
gc.collect()
assert gc.get_freeze_count() == 0, "it follows no more"
"""


def _run(clock: str) -> list[str]:
    command = [sys.executable, "-P", "-c", SCRIPT.format(clock=clock)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_what_a_long_collection_found_alive_is_looked_at_again_after_a_hundred_others() -> None:
    assert _run("lambda: next(seconds)") == ["True", "False", "True", "True"]


def test_short_collections_stay_as_they_are() -> None:
    assert _run("lambda: 0.0") == ["False", "True", "True", "False"]
