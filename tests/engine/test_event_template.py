"""Events of a stream from a template: the bytes are those of the whole chunk, whatever the texts are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.api.endpoints.choice_stream import EventTemplate, encode_event
from argosy_protocol.openai import ChatChunkChoice, ChatCompletionChunk, Completion, CompletionChoice, Delta

TEXTS = st.text() | st.sampled_from(
    ['"', '"content":""', '\\"text":""', "data: x\n\n", "\x00\u2028\U0001f600"]
)


@given(text=TEXTS, model=TEXTS, field=st.sampled_from(["content", "reasoning"]))
def test_events_of_a_chat_are_those_of_its_chunks(text: str, model: str, field: str) -> None:
    def chunk(piece: str) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=3, delta=Delta(**{field: piece}))
        return ChatCompletionChunk(id="chatcmpl-1", created=7, model=model, choices=[choice])

    event = EventTemplate(chunk(""), field).event(text)
    assert event == encode_event(chunk(text))
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert msgspec.json.decode(event.removeprefix(b"data: "), type=ChatCompletionChunk) == chunk(text)


@given(text=TEXTS, model=TEXTS)
def test_events_of_a_completion_are_those_of_its_chunks(text: str, model: str) -> None:
    def chunk(piece: str) -> Completion:
        choice = CompletionChoice(index=0, text=piece)
        return Completion(id='cmpl-"text":""', created=7, model=model, choices=[choice])

    template = EventTemplate(chunk(""), "text")
    assert template.event(text) == encode_event(chunk(text))
    assert template.event(text) == template.event(text), "a template is used many times"


def test_text_that_is_no_unicode_is_an_error_and_no_event() -> None:
    chunk = Completion(id="c", created=7, model="m", choices=[CompletionChoice(index=0, text="")])
    with pytest.raises(UnicodeEncodeError):
        EventTemplate(chunk, "text").event("\ud800")
