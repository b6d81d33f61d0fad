"""Checks of `helm test`: the router is ready, refuses requests without a key, lists models to those with one, and one
of them answers a chat, unless it has no replica yet."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

DEADLINE_S = 30
READY_S = float(os.environ.get("READY_S", "60"))
"""How long a router that has just been installed may take to become ready."""
CHAT_S = float(os.environ.get("CHAT_S", "30"))
"""How long a chat may take. Routers hold a request for a model without replicas for longer."""
# The certificate is for the name that clients use, which this pod does not know.
UNVERIFIED = ssl._create_unverified_context()  # noqa: S323


MOST_MODELS = 8
"""Models that are asked if those before fail."""
DOES_NOT_CHAT = (400, 404)
"""Statuses with which a model that only embeds or ranks refuses a chat."""


def get(
    path: str, key: str = "", body: bytes | None = None, *, timeout: float = DEADLINE_S
) -> tuple[int, bytes]:
    """GET, or POST with a body."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(os.environ["ROUTER_URL"] + path, data=body, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout, context=UNVERIFIED) as response:  # noqa: S310
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
    if models:
        print(chat_with_one(models, key))


def chat_with_one(models: list[str], key: str) -> str:
    """Ask a model for one token, and the next one only if that fails: a request starts a replica of a model that is
    scaled to zero."""
    found = []
    for model in models[:MOST_MODELS]:
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello!"}]}
        try:
            status, answer = get("/v1/chat/completions", key, json.dumps(body).encode(), timeout=CHAT_S)
        except TimeoutError:
            status, answer = 503, b"no answer in time"
        except OSError as error:
            status, answer = 0, str(error).encode()
        if status == 200 and json.loads(answer)["choices"]:
            return f"{model} answers a chat"
        if status == 503:
            if all(status in DOES_NOT_CHAT for status, _ in found):
                return f"the chat was skipped: {model} has no replica yet: {answer[:200]!r}"
            break
        found.append((status, f"{model}: {status}: {answer[:200]!r}"))
    if all(status in DOES_NOT_CHAT for status, _ in found):
        return "no model is for chats"
    sys.exit("no model answers a chat: " + "; ".join(text for _, text in found))


if __name__ == "__main__":
    main()
