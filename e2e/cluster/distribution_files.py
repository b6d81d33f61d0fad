"""Prints, as JSON, the installed distributions that the named ones need, and the files of each.

Run by the interpreter that has them: `python -I distribution_files.py torch`. Requirements that are not
installed are left out. Output: {"version": [3, 11], "root": "...",
"distributions": {"torch==2.11.0": ["torch/__init__.py", ...]}}; file names are relative to root. Exit status
3: one is not installed.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import sys
import sysconfig
from pathlib import Path


def closure(names: list[str]) -> dict[str, metadata.Distribution]:
    """Installed distributions by `name==version`; exit status 3 when one of `names` is not installed."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    wanted = [(name, "", True) for name in names]  # (distribution, extra or "", whether it must be there)
    while wanted:
        name, extra, required = wanted.pop()
        canonical = re.sub(r"[-_.]+", "-", name).lower()
        if (canonical, extra) in seen:
            continue
        seen.add((canonical, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if required:
                sys.exit(3)
            continue
        found[f"{canonical}=={distribution.version}"] = distribution
        for requirement in distribution.requires or ():
            specifier, _, marker = requirement.partition(";")
            asked_by = re.search(r"""\bextra\s*==\s*["']([^"']+)["']""", marker)
            if (asked_by[1] if asked_by else "") == extra:
                match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[([^]]*)])?", specifier)
                assert match
                extras = [each.strip() for each in (match[2] or "").split(",") if each.strip()]
                wanted += [(match[1], each, False) for each in ("", *extras)]
    return found


def main(names: list[str]) -> None:
    root = Path(sysconfig.get_path("platlib"))
    files = {
        key: [str(file) for file in distribution.files or () if not str(file).startswith("..")]
        for key, distribution in closure(names).items()
    }
    json.dump({"version": sys.version_info[:2], "root": str(root), "distributions": files}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
