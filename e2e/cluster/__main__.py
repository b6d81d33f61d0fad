"""The command line: `PYTHONPATH=e2e python -m cluster COMMAND`.

Exit status: 0 done, 1 the cluster could not be brought to that state (the last line says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cluster import base_image, go_binaries, lifecycle
from cluster.settings import Settings
from cluster.shell import ClusterError, stop_cleanly


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description="A real Kubernetes on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build or install all that `up` needs, start nothing")
    start = commands.add_parser("up", help="bring the cluster up, taking down what is left of an earlier one")
    start.add_argument("--nodes", choices=("1", "2"), help="default: $ARGOSY_E2E_NODES or 1")
    stop = commands.add_parser("down", help="remove everything but the caches and the logs")
    stop.add_argument("--purge", action="store_true", help="the image stores and the logs too")
    commands.add_parser("status", help="processes, nodes and pods")
    commands.add_parser("env", help="lines to eval in a shell: KUBECONFIG, PATH")
    collect = commands.add_parser("collect", help="logs, events and descriptions into a folder")
    collect.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    stop_cleanly()
    try:
        environment = dict(os.environ)
        if getattr(arguments, "nodes", None):
            environment["ARGOSY_E2E_NODES"] = arguments.nodes
        settings = Settings.from_env(environment)
        if arguments.command == "build" and settings.external_kubeconfig is None:
            go_binaries.ensure_packages()
            go_binaries.ensure_binaries(settings)
            base_image.ensure_rootfs(settings)
        elif arguments.command == "up":
            lifecycle.up(settings)
        elif arguments.command == "down":
            lifecycle.down(settings, purge=arguments.purge)
        elif arguments.command == "status":
            print(lifecycle.status(settings))
        elif arguments.command == "env":
            print(
                f"export KUBECONFIG={settings.kubeconfig}\nexport PATH={go_binaries.binaries(settings)}:$PATH"
            )
        elif arguments.command == "collect":
            lifecycle.connect(settings).collect_artifacts(arguments.folder)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; `down` removes what is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
