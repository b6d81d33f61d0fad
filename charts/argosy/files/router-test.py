"""Checks of `helm test`: the router is ready, refuses requests without a key, and lists models to those with one."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

DEADLINE_S = 10
READY_S = float(os.environ.get("READY_S", "60"))
"""How long a router that has just been installed may take to become ready."""
# The certificate is for the name that clients use, which this pod does not know.
UNVERIFIED = ssl._create_unverified_context()  # noqa: S323


def get(path: str, key: str = "") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(os.environ["ROUTER_URL"] + path, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S, context=UNVERIFIED) as response:  # noqa: S310
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def usable_key(text: str) -> str:
    """The first key that is given as it is; empty if all are digests. Terms follow a key."""
    for line in text.splitlines():
        words = line.split()
        if words and not words[0].startswith(("#", "sha256:")):
            return words[0]
    return ""


def expect(path: str, status: int, key: str = "") -> bytes:
    found, body = get(path, key)
    if found != status:
        sys.exit(f"GET {path}: {found} instead of {status}: {body[:500]!r}")
    return body


def wait_until_ready() -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if get("/ready")[0] == 200 or time.monotonic() > deadline:
                break
        except OSError:  # nothing listens yet
            if time.monotonic() > deadline:
                raise
        time.sleep(1)
    expect("/ready", 200)


def main() -> None:
    wait_until_ready()
    key = ""
    if "KEYS_FILE" in os.environ:
        expect("/v1/models", 401)
        with open(os.environ["KEYS_FILE"]) as file:
            key = usable_key(file.read())
        if not key:
            print("the router is ready and asks for a key; all keys are digests, so none was tried")
            return
    models = [card["id"] for card in json.loads(expect("/v1/models", 200, key))["data"]]
    print(f"the router is ready and serves {', '.join(models) or 'no model yet'}")


if __name__ == "__main__":
    main()
