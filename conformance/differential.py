"""Sends the same generated requests to our engine and to vLLM's server, and reports where the answers differ.

    python conformance/differential.py --ours URL --vllm URL [--requests 600] [--seed 0]

Both servers must serve one model under the name `tiny`, in float32. Compared are the status, the fields of the body
and the types of their values (a field that is null counts as absent), and, of greedy answers, the text.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from request_fields import GeneratedRequest, generated_requests


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", required=True, help="URL of our engine")
    parser.add_argument("--vllm", required=True, help="URL of vLLM's server")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def shape(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the JSON type of every value of a body that is not null; items of a list count once."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from shape(inner, f"{path}.{'*' if 'logprobs' in path and _is_token(name) else name}")
    elif isinstance(value, list):
        for inner in value:
            yield from shape(inner, f"{path}[]")
    elif value is not None:
        yield (
            path,
            "number"
            if isinstance(value, (int, float)) and not isinstance(value, bool)
            else type(value).__name__,
        )


def _is_token(name: str) -> bool:
    return name not in {
        "tokens",
        "token_logprobs",
        "top_logprobs",
        "text_offset",
        "content",
        "token",
        "logprob",
        "bytes",
        "rank",
        "decoded_token",
    }


class Answer:
    """What a server answered: its status, the shape of the body or of all events together, and the text."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.bodies: list[Any] = []
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            lines = response.text.splitlines()
            self.bodies = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        elif response.content:
            self.bodies = [response.json()]
        if self.status == 200 and any("error" in body for body in self.bodies):
            self.status = 299  # an error within a stream

    @property
    def shape(self) -> set[tuple[str, str]]:
        return {found for body in self.bodies for found in shape(body)}

    @property
    def text(self) -> str:
        """Reasoning and content, without the newline after the reasoning's marker, which vLLM keeps."""
        parts = []
        for body in self.bodies:
            for choice in body.get("choices", ()):
                said = choice.get("message") or choice.get("delta") or {}
                parts += [choice.get("text"), said.get("reasoning"), said.get("content")]
        return "".join(filter(None, parts)).lstrip("\n")

    @property
    def message(self) -> str:
        for body in self.bodies:
            if isinstance(body, dict) and isinstance(body.get("error"), dict):
                return str(body["error"].get("message"))
        return ""


def differences(ours: Answer, theirs: Answer, greedy: bool) -> Iterator[tuple[str, str]]:
    """Yield kinds of differences and what they are; texts are compared of greedy answers only."""
    if ours.status != theirs.status:
        yield (
            "status",
            f"ours {ours.status} {ours.message[:140]!r}, vLLM {theirs.status} {theirs.message[:140]!r}",
        )
    elif ours.status == 200:
        if added := sorted(path for path, _ in ours.shape - theirs.shape):
            yield "only ours has", ", ".join(added)
        if missing := sorted(path for path, _ in theirs.shape - ours.shape):
            yield "only vLLM has", ", ".join(missing)
        if greedy and ours.text != theirs.text:
            yield "text", f"ours {ours.text[:60]!r}, vLLM {theirs.text[:60]!r}"


def send(client: httpx.Client, request: GeneratedRequest) -> Answer:
    """Send a request; once more if the server closed an idle connection at the same moment."""
    try:
        return Answer(client.post(request.path, json=request.body))
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Answer(client.post(request.path, json=request.body))


def main() -> None:
    options = arguments()
    counts: Counter[str] = Counter()
    lines = []
    with (
        httpx.Client(base_url=options.ours, timeout=100) as ours,
        httpx.Client(base_url=options.vllm, timeout=100) as vllm,
    ):
        for request in generated_requests(options.requests, options.seed):
            mine, theirs = send(ours, request), send(vllm, request)
            found = dict(differences(mine, theirs, request.body["temperature"] == 0))
            counts["requests"] += 1
            counts["same status"] += "status" not in found
            counts["same"] += not found
            counts["both 200"] += mine.status == theirs.status == 200
            counts["same text"] += mine.status == theirs.status == 200 and "text" not in found
            counts["5xx ours"] += mine.status >= 500
            counts["5xx vLLM"] += theirs.status >= 500
            asked = ", ".join(f"{name}={json.dumps(request.body[name])}" for name in request.fields)
            lines += [f"{kind} | {request.path} {asked} | {what}" for kind, what in found.items()]
    print("\n".join(sorted(lines)))
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
