"""passed.json: the commit on which each lane last passed, and which lanes the changes since then select.

Whoever saw a lane pass on a commit records it (`python3 -m gate record`) and commits the file. A commit that is no
ancestor of HEAD, or is not there because the clone is shallow, says nothing: its lane runs.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.lanes import UNITS, Lanes

PASSED = Path(__file__).with_name("passed.json")


def git(*arguments: str, root: Path) -> str:
    """Return what git prints; raises subprocess.CalledProcessError."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout


@dataclass(frozen=True)
class Selection:
    """The lanes that a change runs, each with the reason."""

    reasons: dict[str, str]
    left_out: dict[str, str]

    @property
    def lanes(self) -> frozenset[str]:
        return frozenset(self.reasons)


def read_passed(path: Path = PASSED) -> dict[str, dict[str, Any]]:
    """Return lane -> {"commit": its full hash, "date": of the run, "seconds": by step}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def is_ancestor(commit: str, root: Path) -> bool:
    """Whether HEAD descends from a commit that this clone has."""
    done = subprocess.run(
        ["git", "-C", str(root), "merge-base", "--is-ancestor", commit, "HEAD"],
        check=False, capture_output=True,
    )  # fmt: skip
    return done.returncode == 0


def changed_since(commit: str, root: Path) -> list[str]:
    """Return the paths that differ between a commit and the working tree, files that git does not know included."""
    changed = git("diff", "--name-only", "--no-renames", "-z", commit, root=root).split("\0")
    untracked = git("ls-files", "--others", "--exclude-standard", "-z", root=root).split("\0")
    return sorted({path for path in (*changed, *untracked) if path})


def commits_since(commit: str, root: Path) -> int:
    return int(git("rev-list", "--count", f"{commit}..HEAD", root=root))


def select(lanes: Lanes, passed: dict[str, dict[str, Any]], root: Path) -> Selection:
    """Choose the lanes for the tree as it stands."""
    reasons = {UNITS: "every change"}
    left_out = {}
    for lane in lanes.purposes:
        if lane == UNITS:
            continue
        base = passed.get(lane, {}).get("commit")
        if base is None:
            reasons[lane] = "has not passed yet"
        elif not is_ancestor(base, root):
            reasons[lane] = f"{base[:8]}, where it passed, is no ancestor here"
        else:
            touching = [path for path in changed_since(base, root) if lane in lanes.selected_by(path)]
            if touching:
                more = f" and {len(touching) - 1} more" if touching[1:] else ""
                reasons[lane] = f"{touching[0]}{more} changed since {base[:8]}"
            else:
                left_out[lane] = f"nothing of it changed since {base[:8]}"
    return Selection(reasons, left_out)
