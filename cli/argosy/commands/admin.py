"""`argosy route` and `argosy dashboard`: a router's admin port, its address and key, and JSON calls to it.

`route` shows which replica would get a prompt, and why, without sending anything to a replica; `dashboard` prints the
address of the router's page, with its key. Must not know: how a choice is made, which the admin port explains.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlencode, urlsplit

import msgspec

from argosy.errors import OK, CommandError, UsageError, reason
from argosy.local.control import choose_state_dir, connect, status_of
from argosy.terminal import Parser, add_output, add_state_dir, print_json, table
from argosy_fetcher.progress import printable
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID

ADMIN_KEY_ENV: Final = "ARGOSY_ROUTER_ADMIN_KEY"
FLEET_KEY_ENV: Final = "ARGOSY_FLEET_KEY"
_ANSWER_S: Final = 10.0


def admin_port(
    url: str | None, state_dir: str | None, key: str = "", *, in_cluster: str = ""
) -> tuple[str, str]:
    """Return address and key: those of the running fleet, unless an address is given.

    Args:
        key: the key of the port at `url`; that of the environment if left out.
        in_cluster: how a cluster is asked the same, for the message without a fleet.

    Raises:
        UsageError: the environment's fleet key is too short.
        CommandError: no fleet runs here, or its router does not.
    """
    if url is not None:
        return url.rstrip("/"), _admin_key(key)
    state = choose_state_dir(state_dir)
    status = status_of(connect(state, in_cluster=in_cluster), _ANSWER_S)
    if status is None or not status.router.admin_url:
        raise CommandError("the fleet's router is not running; `argosy ps` shows why")
    return status.router.admin_url, internal_key(state.fleet_key(), ADMIN_KEY_UID)


def _admin_key(given: str) -> str:
    """Return the given key, else that of the environment, else the one that belongs to the environment's fleet key,
    else an empty text.

    Raises:
        UsageError: the fleet key is too short.
    """
    if key := given or os.environ.get(ADMIN_KEY_ENV, ""):
        return key
    fleet_key = os.environ.get(FLEET_KEY_ENV, "")
    try:
        return internal_key(fleet_key.encode(), ADMIN_KEY_UID) if fleet_key else ""
    except ValueError as error:
        raise UsageError(f"{FLEET_KEY_ENV}: {error}") from None


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


def call(
    method: str,
    url: str,
    key: str = "",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    verifies: bool = True,
) -> Any:
    """Send a request; return the response's JSON value.

    Args:
        verifies: whether to verify the certificate of an https:// URL by the system's authorities.

    Raises:
        UsageError: not an http:// or https:// URL.
        CommandError: there is no answer, or the answer is an error.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not an http:// or https:// URL")
    sent = {"content-type": "application/json", **(headers or {})}
    if key:
        sent["authorization"] = f"Bearer {key}"
    try:
        connection = _connection(parts, timeout_s, verifies=verifies)
        try:
            connection.request(
                method, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, sent
            )
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        hint = (
            "; --insecure believes any certificate" if isinstance(error, ssl.SSLCertVerificationError) else ""
        )
        raise CommandError(
            f"no answer from {parts.scheme}://{parts.netloc}: {reason(error)}{hint}"
        ) from error
    try:
        if response.status == 200:
            return msgspec.json.decode(data)
        message = msgspec.json.decode(data, type=_Refusal).error.message
    except msgspec.DecodeError:
        message = ""
    if response.status == 401:
        message += "; pass --admin-key KEY, or set ARGOSY_FLEET_KEY"
    raise CommandError(f"{response.status} {message or response.reason}")


def _connection(url: SplitResult, timeout_s: float, *, verifies: bool) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "http":
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)


_IN_CLUSTER: Final = "`kubectl argosy route MODEL PROMPT` asks a cluster"
_RECENT: Final = ("AGE", "REQUEST", "REPLICA", "ROUTE", "PROMPT", "CACHED", "PREDICTED", "TTFT", "STATUS")


def route(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy route",
        description="Show which replica a prompt would get, with each term of each candidate's cost.",
        epilog=f"The running local fleet is asked unless --admin-url names a router's admin port; its key comes from "
        f"--admin-key, {ADMIN_KEY_ENV}, or the fleet key in {FLEET_KEY_ENV}.",
    )
    parser.add_argument("model", nargs="?", help="a name the router lists under /v1/models")
    parser.add_argument("prompt", nargs="?", help="the user's message; - reads standard input")
    parser.add_argument(
        "--body", metavar="FILE", help="explain this JSON request body instead; - is standard input"
    )
    parser.add_argument("--session", default="", metavar="ID", help="as if sent with x-session-id")
    parser.add_argument("--recent", type=int, metavar="N", help="list the last N choices instead")
    parser.add_argument("--admin-url", metavar="URL", help="admin port of a router (the running fleet's)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="believe any certificate of an https:// admin port: it is for the name that clients use",
    )
    parser.add_argument("--admin-key", default="", metavar="KEY", help="its key, if it has one")
    add_output(parser)
    add_state_dir(parser)
    options = parser.parse_args(argv)
    url, key = admin_port(options.admin_url, options.state_dir, options.admin_key, in_cluster=_IN_CLUSTER)
    if options.recent is not None:
        query = urlencode({"limit": options.recent, "model": options.model or ""})
        answer = call(
            "GET", f"{url}/decisions?{query}", key, timeout_s=_ANSWER_S, verifies=not options.insecure
        )
        text = _render_recent(answer)
    else:
        headers = {"x-session-id": options.session} if options.session else {}
        body = _body(options.model, options.prompt, options.body)
        answer = call(
            "POST", f"{url}/explain", key, body, headers, timeout_s=_ANSWER_S, verifies=not options.insecure
        )
        text = _render(answer)
    if options.output == "json":
        print_json(answer)
    else:
        print(text)
    return OK


def _body(model: str | None, prompt: str | None, file: str | None) -> bytes:
    if file is not None:
        if model is not None:
            raise UsageError("--body has the model and the prompt in it; leave out MODEL and PROMPT")
        try:
            return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {file}: {error.strerror}") from error
    if model is None or prompt is None:
        raise UsageError("pass MODEL and PROMPT, or --body FILE, or --recent N")
    content = sys.stdin.read() if prompt == "-" else prompt
    return msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": content}]})


def _render(answer: dict[str, Any]) -> str:
    chosen = answer["replica"]
    lines = []
    if chosen is None:
        lines.append(printable(f"no replica: {answer['reason']}"))
    else:
        ttft_s = answer["predicted_ttft_s"]
        expected = (
            "its speed is not measured yet" if ttft_s is None else f"first token in about {_duration(ttft_s)}"
        )
        lines.append(
            f"{printable(chosen)}  {answer['reason']}, policy {answer['policy']}: about {answer['prompt_tokens']} "
            f"prompt tokens in {answer['prompt_chunks']} chunks, {answer['predicted_cached_tokens']} expected in its "
            f"cache, {expected}"
        )
    candidates = answer["candidates"]
    if candidates:
        names = list(candidates[0]["terms"])
        header = ("", "REPLICA", "STATE", "HIT", "FROM", *(_title(name) for name in names), "COST")
        rows = [
            (
                "*" if row["replica"] == chosen else "",
                row["replica"],
                row["state"],
                str(row["hit_tokens"]),
                row["hit_source"],
                *(_figure(name, row["terms"][name]) for name in names),
                _duration(row["cost_s"]),
            )
            for row in candidates
        ]
        lines += ["", table(header, rows)]
    lines += [
        printable(f"{row['replica']} ({row['state']}) is left out: {row['reason']}")
        for row in answer["excluded"]
    ]
    return "\n".join(lines)


def _render_recent(records: list[dict[str, Any]]) -> str:
    now = time.time()
    rows = [
        (
            _duration(max(0.0, now - record["time"])),
            record["request_id"],
            record["replica"],
            record["reason"],
            str(record["prompt_tokens"]),
            "-" if record["cached_tokens"] is None else str(record["cached_tokens"]),
            str(record["predicted_cached_tokens"]),
            "-" if record["ttft_s"] is None else _duration(record["ttft_s"]),
            str(record["status"] or "-"),
        )
        for record in records
    ]
    return table(_RECENT, rows)


def _title(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ").upper()


def _figure(name: str, value: float) -> str:
    return _duration(value) if name.endswith("_s") else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f}s" if abs(seconds) >= 10 else f"{seconds * 1000:.1f}ms"


_CLUSTERS_PORT: Final = (
    "--admin-url names the admin port of a cluster's router, behind `kubectl port-forward`"
)


def dashboard(argv: Sequence[str]) -> int:
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
    url, key = admin_port(options.admin_url, options.state_dir, in_cluster=_CLUSTERS_PORT)
    print(f"{url}/#key={key}" if key else f"{url}/")
    return OK
