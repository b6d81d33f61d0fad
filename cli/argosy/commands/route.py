"""`argosy route`: show which replica would get a prompt, and why, without sending anything to a replica.

Owns: the table. Must not know: how the choice is made, which the router's admin port explains.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from argosy.admin_access import ADMIN_KEY_ENV, FLEET_KEY_ENV, admin_port
from argosy.admin_client import call
from argosy.arguments import Parser, add_state_dir
from argosy.errors import OK, CommandError, UsageError
from argosy.terminal import table
from argosy_fetcher.progress_display import printable

_ANSWER_S: Final = 10.0
_IN_CLUSTER: Final = "`kubectl argosy route MODEL PROMPT` asks a cluster"
_RECENT: Final = ("AGE", "REQUEST", "REPLICA", "ROUTE", "PROMPT", "CACHED", "PREDICTED", "TTFT", "STATUS")


def main(argv: Sequence[str]) -> int:
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
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="format (%(default)s)"
    )
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
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")
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
