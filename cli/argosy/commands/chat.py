"""`argosy chat`: talk to a model through the router, or with any OpenAI endpoint.

Only the answer goes to standard output, as it arrives, so that the command can be part of a pipe; reasoning is shown on
a terminal only, dimmed, and otherwise noted on standard error. Invariant: a stream that breaks off raises and never
ends silently.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from argosy.errors import OK, CommandError, UsageError, reason
from argosy.terminal import Parser, add_state_dir, positive_seconds


class Delta(NamedTuple):
    """A piece of the answer."""

    text: str
    is_reasoning: bool = False
    finish_reason: str = ""
    """Why the answer ended, in its last piece: `stop`, `length` or another reason of the API."""


class ChatClient:
    """One OpenAI base URL, with or without `/v1`."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not an http:// or https:// URL")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def models(self) -> list[str]:
        """Names of the models at `/v1/models`."""
        listing = json.loads(self._call("GET", "/models", None).read())
        return [str(model["id"]) for model in listing["data"]]

    def chat(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Stream the answer to a chat.

        Raises:
            CommandError: the endpoint refused the request, or the stream broke off.
        """
        response = self._call("POST", "/chat/completions", {**body, "stream": True})
        try:
            for event in _events(response):
                if "error" in event:
                    raise CommandError(f"the stream ended: {_message(event)}")
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if text := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield Delta(text, is_reasoning=True)
                    if text := delta.get("content"):
                        yield Delta(text)
                    if finish_reason := choice.get("finish_reason"):
                        yield Delta("", finish_reason=str(finish_reason))
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the stream broke off: {reason(error)}") from error
        finally:
            response.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.close()
            self._connection.request(method, self._path + path, data, self._headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"no answer from {self._url}: {reason(error)}; is the fleet up (`argosy ps`), or is --url another?"
            ) from error
        if response.status == 200:
            return response
        try:
            message = _message(json.loads(response.read()))
        except ValueError:
            message = response.reason
        if response.status == 401:
            message += "; pass --api-key KEY or set OPENAI_API_KEY"
        raise CommandError(f"{response.status} {message}")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise http.client.IncompleteRead(b"")


def _message(document: object) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return str(error or document)
    message, param = str(error.get("message") or document), error.get("param")
    return f"{message} ({param})" if param and str(param) not in message else message


API_KEY_ENVS: Final = ("ARGOSY_ROUTER_API_KEY", "OPENAI_API_KEY")
_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Message = dict[str, Any]
_MAX_IMAGE_BYTES: Final = 32 << 20
"""What an engine takes."""
_IMAGES: Final = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFF", "webp"), (b"GIF8", "gif"))
"""First bytes of the formats that engines read, and their names."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy chat",
        description="Talk to a model through the router: one answer to PROMPT, or a conversation without it.",
        epilog="In a conversation images come with the first question; /clear forgets it, Ctrl-D or /exit ends it. "
        "API key: --api-key, else " + ", else ".join(API_KEY_ENVS) + ".",
    )
    parser.add_argument("model", help="a name the router lists under /v1/models")
    parser.add_argument("prompt", nargs="?", help="the question; - reads standard input")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="PNG, JPEG, WebP or GIF that the question is about; several: give it several times",
    )
    parser.add_argument("--url", help=f"the endpoint (the running fleet's, else {_DEFAULT_URL})")
    parser.add_argument("--api-key", default="", help="bearer key of the endpoint")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy; the model's default if left out"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="repeat a sampled answer")
    parser.add_argument(
        "--timeout", type=positive_seconds, default=300.0, metavar="S", help="longest silence (%(default)s)"
    )
    add_state_dir(parser)
    options = parser.parse_args(argv)
    key = options.api_key or next((os.environ[name] for name in API_KEY_ENVS if os.environ.get(name)), "")
    names = ("max_tokens", "temperature", "seed")
    request = {"model": options.model} | {
        name: value for name in names if (value := getattr(options, name)) is not None
    }
    history: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    images = [_image(Path(file)) for file in options.image]
    prompt = options.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip()
    with ChatClient(options.url or _fleet_url(options.state_dir), key, options.timeout) as endpoint:
        try:
            if prompt is not None:
                _answer(endpoint, request, [*history, _question(prompt, images)])
            else:
                _converse(endpoint, request, history, images)
        except CommandError as error:
            raise _with_models(error, endpoint, options.model) from error
    return OK


def _image(file: Path) -> dict[str, Any]:
    """Return a file as a part of a message.

    Raises:
        UsageError: it cannot be read, or is no image that engines read.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--image {file}: {reason(error)}") from None
    kind = next((kind for start, kind in _IMAGES if data.startswith(start)), None)
    if kind is None:
        raise UsageError(f"--image {file} is no PNG, JPEG, WebP or GIF")
    if len(data) > _MAX_IMAGE_BYTES:
        raise UsageError(f"--image {file} has more than {_MAX_IMAGE_BYTES >> 20} MiB; give a smaller one")
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _question(text: str, images: list[dict[str, Any]]) -> Message:
    content = [*images, {"type": "text", "text": text}] if images else text
    return {"role": "user", "content": content}


def _converse(
    endpoint: ChatClient, request: dict[str, Any], history: list[Message], images: list[dict[str, Any]]
) -> None:
    import readline  # noqa: F401 - gives input() its line editing

    kept = len(history)
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            print()
            return
        if line in ("/exit", "/quit", "/bye"):
            return
        if line == "/clear":
            del history[kept:]
        elif line:
            is_first = len(history) == kept
            history.append(_question(line, images if is_first else []))
            try:
                history.append({"role": "assistant", "content": _answer(endpoint, request, history)})
            except KeyboardInterrupt:  # ends this answer, not the conversation
                history.pop()
                print()


def _answer(endpoint: ChatClient, request: dict[str, Any], messages: list[Message]) -> str:
    """Print the answer as it arrives; return its text."""
    return _print(endpoint.chat({**request, "messages": messages}), has_limit="max_tokens" in request)


def _print(deltas: Iterable[Delta], *, has_limit: bool) -> str:
    text, finish_reason = "", ""
    was_reasoning = has_reasoned = False
    is_styled = sys.stdout.isatty()
    for delta in deltas:
        finish_reason = delta.finish_reason or finish_reason
        if not delta.text:
            continue
        if delta.is_reasoning and not is_styled:  # a pipe gets only the answer
            if not has_reasoned:
                _note("the model is thinking")
            has_reasoned = True
            continue
        has_reasoned |= delta.is_reasoning
        if is_styled and delta.is_reasoning != was_reasoning:
            sys.stdout.write(_DIM if delta.is_reasoning else f"{_PLAIN}\n")
            was_reasoning = delta.is_reasoning
        if not delta.is_reasoning:
            text += delta.text
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write(f"{_PLAIN}\n" if was_reasoning else "\n")
    sys.stdout.flush()
    if finish_reason == "length" and not text.strip():
        doing = "was still thinking" if has_reasoned else "had said nothing"
        remedy = "raise --max-tokens" if has_limit else "its context is full; ask in fewer words"
        _note(f"the model {doing} when it reached the limit of tokens; {remedy}")
    return text


def _note(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)


def _fleet_url(state_dir: str | None) -> str:
    from argosy.local.control import choose_state_dir, status_of  # not with --url: they take a while

    status = status_of(choose_state_dir(state_dir).connect(), 5.0)
    return status.router.url if status else _DEFAULT_URL


def _with_models(error: CommandError, endpoint: ChatClient, model: str) -> CommandError:
    """Add the available models to an error about the model's name."""
    if not str(error).startswith("404"):
        return error
    try:
        names = endpoint.models()
    except CommandError:
        return error
    if model in names or any(repr(name) in str(error) for name in names):  # an engine lists them itself
        return error
    known = ", ".join(repr(name) for name in names) or "none yet"
    return CommandError(f"{error}; models: {known}")
