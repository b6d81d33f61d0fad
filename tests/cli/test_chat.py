"""`argosy chat`: its arguments, and what it shows of an answer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.main import main
from scripted_http import Asked, Reply, ScriptedHttp

THINKING = {"reasoning_content": "hm"}
HI = {"content": "hi"}


def stream(*deltas: dict[str, str], finish_reason: str = "stop") -> bytes:
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": finish_reason})
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


class Endpoint:
    """An OpenAI endpoint that gives one answer to everything, and keeps the bodies of the requests."""

    def __init__(self) -> None:
        self.reply = Reply(body=stream(HI))
        self.listing = b'{"data": [{"id": "tiny"}]}'

    def answer(self, asked: Asked) -> Reply:
        return Reply(body=self.listing) if asked.method == "GET" else self.reply


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
def url(endpoint: Endpoint) -> Iterator[str]:
    with ScriptedHttp(endpoint.answer) as http:
        yield http.url


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "5", "tiny", "hi"],
        ["tiny", "--max-tokens", "5", "hi"],
        ["tiny", "hi", "--max-tokens", "5"],
        ["tiny", "--max-tokens=5", "--", "hi"],
    ],
)
def test_flags_may_stand_anywhere(arguments: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, *arguments]) == 0
    assert capsys.readouterr().out == "hi\n"


def test_a_pipe_gets_the_answer_and_is_told_of_thinking(
    endpoint: Endpoint, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.reply = Reply(body=stream(THINKING, THINKING, HI))
    assert main(["chat", "tiny", "hi", "--url", url]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("hi\n", "(the model is thinking)\n")


def test_a_terminal_gets_the_reasoning_dimmed(
    endpoint: Endpoint, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    endpoint.reply = Reply(body=stream(THINKING, HI))
    assert main(["chat", "tiny", "hi", "--url", url]) == 0
    endpoint.reply = Reply(body=stream(THINKING, finish_reason="length"))
    assert main(["chat", "tiny", "hi", "--url", url]) == 0
    assert shown.getvalue() == "\x1b[2mhm\x1b[0m\nhi\n" + "\x1b[2mhm\x1b[0m\n"
    assert capsys.readouterr().err.startswith("(the model was still thinking when it reached")


@pytest.mark.parametrize(
    ("deltas", "flags", "note"),
    [
        (
            [THINKING],
            ["--max-tokens", "5"],
            "the model was still thinking when it reached the limit of tokens; raise",
        ),
        ([], ["--max-tokens", "5"], "the model had said nothing when it reached the limit of tokens; raise"),
        ([], [], "the model had said nothing when it reached the limit of tokens; its context is full"),
        ([HI], ["--max-tokens", "5"], ""),
    ],
)
def test_an_answer_that_ends_before_it_begins_is_explained(
    deltas: list[dict[str, str]],
    flags: list[str],
    note: str,
    endpoint: Endpoint,
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint.reply = Reply(body=stream(*deltas, finish_reason="length"))
    assert main(["chat", "tiny", "hi", "--url", url, *flags]) == 0
    error = capsys.readouterr().err
    assert note in error
    assert bool(error) == bool(note)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the model `huge` does not exist", "404 the model `huge` does not exist; models: 'tiny'\n"),
        ("no 'huge' here; this engine serves 'tiny'", "404 no 'huge' here; this engine serves 'tiny'\n"),
    ],
)
def test_an_unknown_model_is_answered_with_the_known_ones_once(
    message: str, shown: str, endpoint: Endpoint, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.reply = Reply(404, json.dumps({"error": {"message": message}}).encode())
    assert main(["chat", "huge", "hi", "--url", url]) == 1
    assert capsys.readouterr().err == f"argosy chat: {shown}"


def test_images_come_with_the_question(endpoint: Endpoint, tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b"
    first.write_bytes(b"\x89PNG\r\n\x1a\n")
    second.write_bytes(b"\xff\xd8\xff\xe0")
    with ScriptedHttp(endpoint.answer) as http:
        assert (
            main(["chat", "--url", http.url, "tiny", "--image", str(first), "--image", str(second), "hi"])
            == 0
        )
    (asked,) = http.asked
    assert json.loads(asked.body)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/4A=="}},
                {"type": "text", "text": "hi"},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("content", "told"), [(b"%PDF", "is no PNG, JPEG, WebP or GIF"), (None, "--image"), (b"", "is no PNG")]
)
def test_files_that_are_no_images(
    content: bytes | None, told: str, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.png"
    if content is not None:
        file.write_bytes(content)
    assert main(["chat", "--url", url, "tiny", "--image", str(file), "hi"]) == 2
    assert told in capsys.readouterr().err
