"""Pictures of a model that sees: what is said of them is true, and a run of its training leaves a folder that loads."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest
from transformers import Qwen2_5_VLForConditionalGeneration

from pictures import COLOURS, SHAPES, ask, conversation, picture, rgb
from train_vision import train


def test_a_picture_is_the_same_each_time_and_has_what_is_said_of_it() -> None:
    chosen = random.Random(1)
    for _ in range(20):
        seen = picture(chosen)
        image = seen.image()
        assert image.tobytes() == seen.image().tobytes()
        assert 96 <= min(image.size) <= max(image.size) < 320
        colours = image.getcolors(1 << 20)
        assert colours is not None
        assert len(colours) > len(seen.parts), "shapes and a background"
        assert {part.shape for part in seen.parts} <= {*SHAPES}
        assert seen.background not in {part.colour for part in seen.parts}
        question, answer = ask(chosen, seen)
        assert question
        assert answer.endswith(".")


def test_colours_of_different_names_are_different() -> None:
    chosen = random.Random(2)
    drawn = {name: {rgb(name, chosen) for _ in range(50)} for name in COLOURS}
    assert all(not drawn[a] & drawn[b] for a in COLOURS for b in COLOURS if a < b)


def test_answers_are_about_the_last_picture_that_was_shown() -> None:
    chosen = random.Random(3)
    turns = [turn for _ in range(300) for turn in conversation(chosen)]
    shown = [turn for turn in turns if turn.picture is not None and " and " in turn.answer]
    assert shown
    assert all(turn.answer == str(turn.picture) for turn in shown)


@pytest.mark.timeout(300)
def test_a_run_leaves_a_folder_that_loads(tmp_path: Path) -> None:
    train(tmp_path, argparse.Namespace(minutes=1e-4, look_minutes=1e-4, seed=0, rate=1e-3, batch=2))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    assert 1e6 < model.num_parameters() < 3e6
    assert (tmp_path / "preprocessor_config.json").is_file()
    assert not (tmp_path / "checkpoint.pt").exists()
