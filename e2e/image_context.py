"""What images are built from: a folder with the wheel, the source archive if asked for, and all of `images`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_context(*, with_sources: bool = False) -> Path:
    """Make dist/images anew, so that images depend on nothing else of the tree.

    Args:
        with_sources: the source archive as well, which the router's image compiles.
    """
    context = ROOT / "dist" / "images"
    context.mkdir(parents=True, exist_ok=True)
    for old in context.iterdir():
        old.unlink()
    python = [sys.executable, "-m"]
    wheel = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(context), str(ROOT)]
    subprocess.run([*python, *wheel], check=True)
    if with_sources:
        archive = ["hatchling", "build", "--target", "sdist", "--directory", str(context)]
        subprocess.run([*python, *archive], cwd=ROOT, check=True)
    for file in (ROOT / "images").iterdir():
        if file.is_file():
            (context / file.name).write_bytes(file.read_bytes())
    return context


def label_arguments() -> dict[str, str]:
    """Build arguments of the labels that tell what an image was made from; the time is the commit's."""
    words = ["git", "-C", str(ROOT), "show", "--no-patch", "--format=%H %cI", "HEAD"]
    revision, created = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    return {"REVISION": revision, "CREATED": created}
