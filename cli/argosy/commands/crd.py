"""`argosy crd`: print the CustomResourceDefinition, for `kubectl apply --server-side -f -`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from argosy.arguments import Parser
from argosy.errors import OK


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy crd", description="Print the CustomResourceDefinition of InferenceService as YAML."
    )
    parser.parse_args(argv)
    from argosy_resource.crd import render

    sys.stdout.write(render())
    return OK
