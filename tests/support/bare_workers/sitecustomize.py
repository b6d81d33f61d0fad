"""Python imports this module at its start where this folder is on PYTHONPATH (`site`): see `bare_worker`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

REPLACED = "argosy_engine.worker.worker"


class BareWorkerFinder:
    """Finds `bare_worker` in place of the module of the real worker."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if name != REPLACED:
            return None
        return spec_from_file_location(name, Path(__file__).with_name("bare_worker.py"))


sys.meta_path.insert(0, BareWorkerFinder)
