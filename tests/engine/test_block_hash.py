"""Block hashes are equal only if everything that the content depends on is equal."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from argosy_engine.core.request import Request, hash_block, root_hash
from argosy_engine.messages import EngineCoreRequest, MultimodalFeature
from argosy_engine.params import SamplingParams

BLOCK = 4
PICTURE = 9  # the placeholder token

FEATURES = st.builds(
    lambda offset, length, name: [MultimodalFeature("image", name, offset, length)],
    st.integers(0, 11),
    st.integers(1, 6),
    st.sampled_from(["cat", "dog", "ca", ""]),
)
PREFIXES = st.tuples(
    st.lists(st.integers(0, 1), min_size=12, max_size=12),
    st.sampled_from([None, "t", "ta"]),
    st.sampled_from([None, "t", ""]),
    st.just([]) | FEATURES,
)
Prefix = tuple[list[int], str | None, str | None, list[MultimodalFeature]]


def hashes(prefix: Prefix) -> list[bytes]:
    tokens, salt, adapter, features = prefix
    parent, found = root_hash(salt, adapter), []
    for start in range(0, len(tokens), BLOCK):
        parent = hash_block(parent, tokens[start : start + BLOCK], features, start)
        found.append(parent)
    return found


def content(prefix: Prefix, num_tokens: int) -> object:
    """What tells the first tokens' keys and values apart; where a picture ends is seen in the placeholders."""
    tokens, salt, adapter, features = prefix
    pictures = [(feature.identifier, feature.offset) for feature in features if feature.offset < num_tokens]
    return tokens[:num_tokens], salt or "", adapter, pictures


@given(PREFIXES, PREFIXES)
def test_equal_hashes_mean_equal_content(one: Prefix, other: Prefix) -> None:
    for index, (left, right) in enumerate(zip(hashes(one), hashes(other), strict=True)):
        end = (index + 1) * BLOCK
        if left == right:
            assert content(one, end) == content(other, end)
        elif one[3] == other[3]:
            assert content(one, end) != content(other, end)


def test_a_picture_changes_only_the_blocks_from_its_own_on() -> None:
    def of(picture: str) -> list[bytes]:
        features = [MultimodalFeature("image", picture, 5, 5)]
        message = EngineCoreRequest(
            "a", [1, 2, 3, 4, 5, *[PICTURE] * 5, 6, 7], SamplingParams(), 0.0, mm_features=features
        )
        return Request(message, BLOCK, True).block_hashes

    cat, dog = of("cat"), of("dog")
    assert [left == right for left, right in zip(cat, dog, strict=True)] == [True, False, False]
    assert of("cat") == cat


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_blocks_of_many_pictures_are_hashed_with_those_that_they_have(length: int) -> None:
    features = [
        MultimodalFeature("image", f"{at}", at, length) for at in range(2, 120, length + (length % 3) * 4)
    ]
    message = EngineCoreRequest("a", [PICTURE] * 160, SamplingParams(), 0.0, mm_features=features)
    assert Request(message, BLOCK, True).block_hashes == hashes(([PICTURE] * 160, None, None, features))
    begun = Request(message, BLOCK, True)
    del begun.block_hashes[7:]
    begun.hash_full_blocks()
    assert begun.block_hashes == Request(message, BLOCK, True).block_hashes


def test_salt_and_adapter_cannot_pass_for_each_other() -> None:
    names = [None, "", "a", "b", "ab", "adapter"]
    roots = {
        (salt or "", adapter): root_hash(salt, adapter) for salt, adapter in itertools.product(names, names)
    }
    assert len(set(roots.values())) == len(roots)
