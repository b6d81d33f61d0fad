"""Covering combinations of options: every two values meet in one of them."""

import itertools

from option_pairs import covering

OPTIONS = {
    "size": [1, 2, 3],
    "dtype": ["bf16", "fp32"],
    "window": [None, 1, 17, 100],
    "has_sinks": [False, True],
}


def test_every_two_values_of_two_options_meet():
    combinations = covering(OPTIONS)
    missing = [
        (first, a, second, b)
        for first, second in itertools.combinations(OPTIONS, 2)
        for a, b in itertools.product(OPTIONS[first], OPTIONS[second])
        if not any(each[first] == a and each[second] == b for each in combinations)
    ]
    assert missing == []
    assert all(each.keys() == OPTIONS.keys() for each in combinations)
    assert len(combinations) < 16, "the product has 48"


def test_the_combinations_are_the_same_every_time():
    assert covering(OPTIONS) == covering(OPTIONS)
