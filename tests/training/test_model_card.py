"""The model card's tables are those of evaluation.json."""

import json

import pytest

import model_card


def test_the_card_shows_the_recorded_figures() -> None:
    card = model_card.CARD.read_text()
    assert model_card.written(card, json.loads(model_card.FIGURES.read_text())) == card


def test_a_missed_target_is_called_missed() -> None:
    figures = {
        "held_out": {"echo": {"direct": 0.895, "thinking": 1.0}, "product": {"direct": 1.0, "thinking": 0.5}}
    }
    *_, echo, product = model_card.families(figures).splitlines()
    assert echo == "| echo | 89.5 | 100.0 | 90 %, missed |"
    assert product == "| product | 100.0 | 50.0 |  |"


def test_a_card_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no marks <!-- families -->"):
        model_card.written("a card", json.loads(model_card.FIGURES.read_text()))
