"""Copied grammars: the leader compiles and follows, and all copies learn the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.models.config_file import load_model_config
from argosy_engine.structured.manager import (
    Compiled,
    CopiedGrammars,
    GrammarRequest,
    StructuredOutputManager,
    create_structured_output_manager,
)
from argosy_engine.structured.structured_outputs_params import StructuredOutputsParams

YES_OR_NO = GrammarRequest(StructuredOutputsParams(choice=["yes", "no"]).spec())
BROKEN = GrammarRequest(StructuredOutputsParams(grammar="root ::= missing").spec())


class Copies:
    """A leader and a follower, called one after the other."""

    def __init__(self, make: Callable[[], StructuredOutputManager]) -> None:
        messages: deque[bytes] = deque()

        def send(message: bytes | None) -> bytes:
            assert message is not None
            messages.append(message)
            return message

        def receive(message: bytes | None) -> bytes:
            assert message is None
            return messages.popleft()

        self.leader = CopiedGrammars(make(), send, is_leader=True)
        self.follower = CopiedGrammars(make(), receive, is_leader=False)
        self.all = (self.leader, self.follower)

    def add(self, request_id: str, request: GrammarRequest) -> Compiled:
        """Wait for a grammar; return what both copies have learnt."""
        for copy in self.all:
            copy.add(request_id, request)
        while True:
            self.leader.wait(60.0)
            (learnt, same) = (copy.take_compiled() for copy in self.all)
            assert learnt == same
            if learnt:
                return learnt[0]


@pytest.fixture
def copies() -> Iterator[Copies]:
    path = resolve_model("builtin://tiny")
    config = load_model_config(path)
    made = Copies(
        lambda: create_structured_output_manager(str(path), config.vocab_size, config.eos_token_ids, 1 << 20)
    )
    yield made
    for copy in made.all:
        copy.close()


def test_copies_learn_the_same(copies: Copies) -> None:
    assert not any(copies.all)
    assert copies.add("a", YES_OR_NO).failure is None
    assert [copy.request_ids for copy in copies.all] == [["a"], ["a"]]
    first, second = (copy.bitmask(["a"]) for copy in copies.all)
    assert first == second
    words = np.frombuffer(first[0], np.uint32)
    allowed = [token for token in range(len(words) * 32) if words[token // 32] >> np.uint32(token % 32) & 1]
    assert 0 < len(allowed) < 10
    assert [copy.accept({"a": allowed[:1]}) for copy in copies.all] == [{}, {}]
    assert [copy.replay("a", allowed[:1]) for copy in copies.all] == [None, None]
    first, second = (copy.bitmask(["a"]) for copy in copies.all)
    assert first == second
    refused = next(token for token in range(100, 200) if token not in allowed)
    failed, same = (copy.accept({"a": [refused], "unknown": [1]}) for copy in copies.all)
    assert failed == same
    assert failed["a"].reason.startswith("no token satisfies")
    assert not any(copies.all)


def test_a_grammar_that_does_not_compile_fails_in_all_copies(copies: Copies) -> None:
    failure = copies.add("a", BROKEN).failure
    assert failure is not None
    assert "not defined" in failure.reason
    assert [copy.request_ids for copy in copies.all] == [[], []]


def test_nothing_is_announced_for_requests_without_a_grammar(copies: Copies) -> None:
    copies.add("a", YES_OR_NO)
    for copy in copies.all:
        copy.forget(["a"])
    # A follower that expected a message would find none.
    assert copies.follower.take_compiled() == []
    assert copies.follower.accept({"b": [1]}) == {}
    assert copies.follower.replay("b", [1]) is None


def test_a_fault_of_the_leader_is_one_of_all_copies(copies: Copies) -> None:
    for copy in copies.all:
        with pytest.raises(
            RuntimeError, match="the first copy could not follow grammars: KeyError: 'unknown'"
        ):
            copy.bitmask(["unknown"])
