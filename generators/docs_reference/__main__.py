"""Write the reference pages: `python -m docs_reference DIRECTORY`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from argosy_batch.main import build_parser as batch_parser
from argosy_engine.api.serve import build_parser as engine_parser
from argosy_router.main import build_parser as router_parser
from docs_reference.alerts import alerts_page
from docs_reference.chart import chart_page
from docs_reference.commands import commands_page
from docs_reference.environment import environment_page
from docs_reference.flags import groups_of
from docs_reference.markdown import page
from docs_reference.metrics import metrics_page
from docs_reference.resource import resource_page
from docs_reference.weight_formats import with_table

ROOT = Path(__file__).parents[2]

_ENGINE_FLAGS = """\
Flags of `argosy serve MODEL`; `argosy doctor MODEL` takes them all. `--config FILE` reads a YAML file whose
keys are flag names with `-` or `_`. The command line wins over the file, and the file over the default; the keys of
[environment variables](environment.md) are accepted in addition. Names and
meanings are vLLM's where vLLM has the flag. Sizes take the suffixes k, m, g (decimal) and K, M, G (binary)."""
_ROUTER_FLAGS = """\
Flags of `argosy router`, which [access](../access.md), [limits](../limits.md), [replicas](../replicas.md) and
[observability](../observability.md) explain. `--config FILE` reads a YAML file whose keys are flag names with `-` or
`_`. The command line wins over [environment variables](environment.md), those over the file, and the file over the
default."""
_BATCH_FLAGS = """\
Flags of `argosy batch`, which keeps [files, batches and stored responses](../batch.md) for routers. It also reads
[environment variables](environment.md). Sizes take the suffixes k, m, g (decimal) and K, M, G (binary)."""


def render() -> dict[str, str]:
    """The pages, by file name."""
    return {
        "command-line.md": commands_page(),
        "engine-flags.md": page("Engine flags", _ENGINE_FLAGS, groups_of(engine_parser())),
        "router-flags.md": page("Router flags", _ROUTER_FLAGS, groups_of(router_parser())),
        "batch-flags.md": page("Flags of `argosy batch`", _BATCH_FLAGS, groups_of(batch_parser())),
        "environment.md": environment_page(),
        "inferenceservice.md": resource_page(ROOT / "crds" / "inferenceservices.yaml"),
        "chart-values.md": chart_page(ROOT / "charts" / "argosy"),
        "metrics.md": metrics_page(),
        "alerts.md": alerts_page(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages into a directory, and the table of weight formats into the page beside it."""
    parser = argparse.ArgumentParser(prog="python -m docs_reference", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for name, text in render().items():
        (directory / name).write_text(text, "utf-8")
    page_of_models = directory.parent / "supported-models.md"
    page_of_models.write_text(with_table(page_of_models.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
