"""The generator: seeded, split cleanly, and in the words of the chat template."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import acceptance
import tokenizer as tiny_tokenizer
from corpus import extraction, facts, memory, mix, render, schema, self_facts, small_talk
from corpus.conversation import Conversation, is_held_out
from corpus.reserved import is_reserved

SHIPPED = Path(__file__).parents[2] / "models" / "argosy-tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tiny_tokenizer.feed_pieces(tokenizer)
    return tokenizer


def sample(seed: str, count: int) -> list[Conversation]:
    return list(islice(mix.training(random.Random(seed)), count))


def text_of(conversation: Conversation) -> str:
    return "".join(span.text for span in render.spans(conversation))


def test_the_same_seed_makes_the_same_conversations(tokenizer: Tokenizer) -> None:
    assert sample("a", 200) == sample("a", 200)
    assert sample("a", 50) != sample("b", 50)


def test_training_never_draws_a_held_out_key(tokenizer: Tokenizer) -> None:
    keys = {key for conversation in sample("split", 1500) for key in conversation.keys}
    assert not any(map(is_held_out, keys))


@pytest.mark.parametrize("family", mix.EVALUATED)
def test_held_out_cases_are_held_out_and_repeatable(tokenizer: Tokenizer, family: str) -> None:
    cases = mix.held_out(family, 10, seed=3)
    assert all(is_held_out(case.keys[-1]) for case in cases)
    assert cases == mix.held_out(family, 10, seed=3)


def test_training_text_is_what_the_chat_template_says(tokenizer: Tokenizer) -> None:
    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    checked = {False: 0, True: 0}
    for conversation in sample("template", 800):
        if conversation.dense:
            continue
        *history, final = conversation.messages
        tools = conversation.tools or None
        whole = shipped.apply_chat_template(conversation.messages, tools=tools, tokenize=False)
        assert text_of(conversation) == whole
        prompt = shipped.apply_chat_template(
            history,
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=conversation.thinking,
        )
        assert whole.startswith(prompt)
        said = f"<think>\n{final.get('reasoning_content')}\n</think>\n\n" if conversation.thinking else ""
        assert whole == prompt + said + render.reply_text(final) + "<|im_end|>\n"
        checked[conversation.thinking] += 1
    assert checked[False] > 250
    assert checked[True] > 80


def test_tokens_of_the_pieces_are_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    for conversation in sample("tokens", 400):
        ids, weights = tiny_tokenizer.encode(tokenizer, render.spans(conversation))
        text = text_of(conversation)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert len(ids) == len(weights)


def test_the_end_token_is_learned_and_history_says_nothing_of_thinking(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    for conversation in sample("weights", 300):
        ids, weights = tiny_tokenizer.encode(tokenizer, render.spans(conversation))
        assert (ids[-2], weights[-2]) == (end, 1.0)
        spans = render.spans(conversation)
        starts = [i for i, span in enumerate(spans) if span.text == "<|im_start|>assistant\n"]
        for start in starts:
            text, weight, first = spans[start + 1]
            if text.startswith("<think>\n") and text[8] != "\n":
                assert weight == 1.0
            else:
                assert 0.0 in (weight, first)


def test_with_tools_the_choice_to_call_weighs_most(tokenizer: Tokenizer) -> None:
    call = tokenizer.token_to_id("<tool_call>")
    checked = 0
    for conversation in sample("decision", 600):
        if conversation.kind != "tool_call" or conversation.thinking:
            continue
        spans = render.spans(conversation)
        ids, weights = tiny_tokenizer.encode(tokenizer, spans)
        start = len(tiny_tokenizer.encode(tokenizer, spans[:-2])[0])
        assert (ids[start], weights[start]) == (call, render.DECISION_WEIGHT)
        assert weights[start + 1] == 1.0
        checked += 1
    assert checked > 10


def test_every_fixed_reply_is_taught(tokenizer: Tokenizer) -> None:
    replies = {conversation.messages[-1]["content"] for conversation in sample("fixed", 4000)}
    fixed = {reply for reply, _ in small_talk.INTENTS.values()}
    fixed |= {
        small_talk.NO_TOOL,
        small_talk.DO_NOT_KNOW,
        small_talk.CANNOT,
        memory.NOT_TOLD,
        facts.NOT_GIVEN,
        "Done.",
    }
    assert fixed <= replies


def said_by_user(*texts: str) -> Conversation:
    return Conversation("any", [{"role": "user", "content": text} for text in texts], [])


def test_training_never_draws_a_prompt_of_the_list_it_is_measured_on(tokenizer: Tokenizer) -> None:
    for case in acceptance.cases("newcomer"):
        assert is_reserved(said_by_user("Hello", *acceptance.user_texts(case), "Bye"))
    assert is_reserved(said_by_user("i'm LENA  what's my name"))
    assert not is_reserved(said_by_user("I'm Lena.", "What's my name?"))
    assert not any(map(is_reserved, sample("reserved", 1500)))


def test_without_tools_nothing_is_said_of_tools(tokenizer: Tokenizer) -> None:
    assert "tool" not in small_talk.CANNOT
    for conversation in sample("without tools", 2500):
        if not conversation.tools:
            assert all(m["content"] != small_talk.NO_TOOL for m in conversation.messages)


def test_one_message_may_tell_and_ask_in_either_order(tokenizer: Tokenizer) -> None:
    rng = random.Random("told")
    kinds = set()
    for _ in range(400):
        turn = memory.one_message(rng)
        if turn.reply == memory.NOT_TOLD:
            kinds.add("not told")
            continue
        assert turn.reply.startswith(("Your ", "You "))
        kinds.add("asked last" if turn.user.rstrip()[-1] == "?" else "asked first or as a demand")
    assert kinds == {"not told", "asked last", "asked first or as a demand"}


def test_answers_about_the_user_hold_what_was_told(tokenizer: Tokenizer) -> None:
    rng = random.Random("self")
    for _ in range(1500):
        fact = self_facts.sample(rng)
        assert fact.value.lower() in fact.told.lower()
        told = set(re.findall(r"\w+", fact.told.lower()))
        assert told & set(re.findall(r"\w+", fact.reply.lower())) - {"your", "is", "are", "you"}
        assert not set(fact.told + fact.asked + fact.reply) & set("[]{}|")


def test_json_is_what_the_text_states_and_null_otherwise(tokenizer: Tokenizer) -> None:
    rng = random.Random("json")
    absent = 0
    for _ in range(600):
        turn = extraction.free(rng)
        for key, value in json.loads(turn.reply).items():
            assert key in turn.user
            absent += value is None
            if isinstance(value, str | int):
                assert str(value).lower() in turn.user.lower()
    assert absent > 50


def test_under_a_schema_only_values_and_what_ends_them_are_taught(tokenizer: Tokenizer) -> None:
    rng = random.Random("schema")
    for _ in range(300):
        turn = schema.sample(rng)
        found = json.loads(turn.reply)
        assert turn.reply == json.dumps(found, ensure_ascii=False)
        taught = [text for text, weight in turn.pieces if weight == 1.0]
        assert len(taught) == len(found)
        for value, text in zip(found.values(), taught, strict=True):
            shown = value + '"' if isinstance(value, str) else json.dumps(value).lstrip("[")
            assert text in (shown + "}", shown + ', "')
