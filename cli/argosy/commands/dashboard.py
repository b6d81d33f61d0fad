"""`argosy dashboard`: print the address of the router's page, with its key.

Owns: the address with its key. Must not know: what the page shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy.admin_access import ADMIN_KEY_ENV, FLEET_KEY_ENV, admin_port
from argosy.arguments import Parser, add_state_dir
from argosy.errors import OK

_IN_CLUSTER: Final = "--admin-url names the admin port of a cluster's router, behind `kubectl port-forward`"


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy dashboard",
        description="Print the address of a router's admin page. The key follows the #, a part that "
        "browsers do not send; the page reads it and removes it from the address bar.",
        epilog=f"The running local fleet's unless --admin-url names another router's admin port; the key of that one "
        f"is {ADMIN_KEY_ENV}, or belongs to the fleet key in {FLEET_KEY_ENV}.",
    )
    parser.add_argument("--admin-url", metavar="URL", help="admin port of a router (the running fleet's)")
    add_state_dir(parser)
    options = parser.parse_args(argv)
    url, key = admin_port(options.admin_url, options.state_dir, in_cluster=_IN_CLUSTER)
    print(f"{url}/#key={key}" if key else f"{url}/")
    return OK
