"""`argosy chat`: talk to a model through the router.

Owns: the conversation on a terminal. Must not know: HTTP. Only the answer goes to standard output, as it arrives, so
that the command can be part of a pipe; reasoning is shown on a terminal only, dimmed, and otherwise noted on standard
error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from argosy.arguments import Parser, add_state_dir, positive_seconds
from argosy.chat_client import ChatClient, Delta
from argosy.errors import OK, CommandError
from argosy.local.state_dir import choose_state_dir

API_KEY_ENVS: Final = ("ARGOSY_ROUTER_API_KEY", "OPENAI_API_KEY")
_DEFAULT_URL: Final = "http://127.0.0.1:8080"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Message = dict[str, str]


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy chat",
        description="Talk to a model through the router: one answer to PROMPT, or a conversation without it.",
        epilog="In a conversation: /clear forgets it, Ctrl-D or /exit ends it. API key: --api-key, else "
        + ", else ".join(API_KEY_ENVS)
        + ".",
    )
    parser.add_argument("model", help="a name the router lists under /v1/models")
    parser.add_argument("prompt", nargs="?", help="the question; - reads standard input")
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
    prompt = options.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip()
    with ChatClient(options.url or _fleet_url(options.state_dir), key, options.timeout) as endpoint:
        try:
            if prompt is not None:
                _answer(endpoint, request, [*history, {"role": "user", "content": prompt}])
            else:
                _converse(endpoint, request, history)
        except CommandError as error:
            raise _with_models(error, endpoint, options.model) from error
    return OK


def _converse(endpoint: ChatClient, request: dict[str, Any], history: list[Message]) -> None:
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
            history.append({"role": "user", "content": line})
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
    from argosy.local.control_client import ControlClient
    from argosy.local.control_messages import Watch

    connection = choose_state_dir(state_dir).connect()
    if connection is None:
        return _DEFAULT_URL
    client = ControlClient(connection, Watch())
    try:
        status = client.next_status(5.0)
    except TimeoutError:
        return _DEFAULT_URL
    finally:
        client.close()
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
