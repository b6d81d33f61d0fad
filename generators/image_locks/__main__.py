"""python -m image_locks FOLDER CONSTRAINTS [OPTION OF UV PIP COMPILE...]: write the lock files of the images, and the
versions that tests run with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from image_locks import CONSTRAINTS, IMAGES, write_constraints, write_lock


def main() -> int:
    folder, constraints, *options = sys.argv[1:]
    uv = Path(sys.executable).with_name("uv")
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    try:
        for image in IMAGES:
            print(write_lock(uv, pyproject, Path(folder), image, *options))
        for each in CONSTRAINTS:
            print(write_constraints(uv, pyproject, Path(constraints), each, *options))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
