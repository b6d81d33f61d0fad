"""python -m image_locks FOLDER [OPTION OF UV PIP COMPILE...]: write the lock files of the images."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from image_locks import IMAGES, write_lock


def main() -> int:
    folder, *options = sys.argv[1:]
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    for image in IMAGES:
        try:
            print(write_lock(Path(sys.executable).with_name("uv"), pyproject, Path(folder), image, *options))
        except subprocess.CalledProcessError as error:
            return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
