"""Pictures of coloured shapes, and what is asked and answered about them: all that the tiny model that sees learns.

A picture has one or two flat shapes on a flat background. Everything about it is drawn at random from a seed: shapes,
colours (a range of hues for each name), place, size, turn, background, size of the picture.
"""

import colorsys
import math
import random
from typing import Final, NamedTuple

from PIL import Image, ImageDraw

SHAPES: Final = ("circle", "square", "triangle", "star", "heart", "cross")
HUES: Final = {
    "red": ((-8, 8), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((23, 40), (0.85, 1.0), (0.88, 1.0)),
    "yellow": ((50, 61), (0.7, 1.0), (0.88, 1.0)),
    "green": ((85, 150), (0.55, 1.0), (0.35, 0.95)),
    "blue": ((205, 243), (0.65, 1.0), (0.55, 1.0)),
    "purple": ((265, 302), (0.5, 1.0), (0.45, 0.85)),
    "black": ((0, 360), (0.0, 0.4), (0.0, 0.13)),
    "white": ((0, 360), (0.0, 0.05), (0.95, 1.0)),
}
"""Of each colour the ranges of hue in degrees, saturation and value."""
COLOURS: Final = tuple(HUES)
NO_PICTURE: Final = "There is no picture. Send me one with a shape in it."
ABOUT: Final = (
    "I am a tiny model that sees. Send me a picture with one or two of these shapes: circle, square, triangle, star, "
    "heart, cross."
)

_SCALE: Final = 2
_CONTRAST: Final = 110
"""Between the colours of a shape and of what is behind it, by the sum of differences of red, green and blue."""

DESCRIBE: Final = (
    "What is in the picture?", "What is in this picture?", "What's in this image?", "What is in the image?",
    "What do you see?", "What can you see in the picture?", "What do you see in this image?", "Describe the picture.",
    "Describe this picture.", "Describe the image.", "Describe this image in one sentence.", "What is this?",
    "What does the picture show?", "What does this image show?", "Tell me what you see.",
    "Name the shape and its colour.", "Name the colour and the shape.", "Name the color and shape.",
    "What shape is this and what colour is it?",
    "What is shown here?", "Look at this picture. What is it?", "Which shapes are in the picture?",
    "What shapes are in this image?", "Please describe what is in the picture.", "Caption this image.",
)  # fmt: skip
COLOUR_OF_ONE: Final = (
    "What colour is it?", "What color is it?", "Which colour does it have?", "What colour is the shape?",
    "What color is the shape?", "What is its colour?", "Which color do you see?", "Name the colour.", "And the colour?",
    "What colour is the {shape}?", "What color is the {shape}?", "Which colour does the {shape} have?",
    "What is the colour of the {shape}?", "What is the color of the {shape}?",
)  # fmt: skip
COLOUR_OF_TWO: Final = tuple(each for each in COLOUR_OF_ONE if "{shape}" in each)
SHAPE_OF_ONE: Final = (
    "What shape is it?", "Which shape is it?", "What shape do you see?", "What shape is this?", "Name the shape.",
    "Which shape does the picture show?", "What shape is in the picture?", "And the shape?", "What is its shape?",
    "What {colour} shape is it?", "Which shape is {colour}?", "What shape is {colour}?",
)  # fmt: skip
SHAPE_OF_TWO: Final = ("Which shape is {colour}?", "What shape is {colour}?", "What is the {colour} shape?")
COUNT: Final = (
    "How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?",
    "How many shapes does the image have?", "Count the shapes.", "How many objects are there?",
)  # fmt: skip
BACKGROUND: Final = (
    "What colour is the background?", "What color is the background?", "Which colour does the background have?",
    "What is behind the shape?",
)  # fmt: skip
HAS_SHAPE: Final = (
    "Is there a {shape}?", "Do you see a {shape}?", "Is there a {shape} in the picture?",
    "Does the picture have a {shape}?",
)  # fmt: skip
HAS_COLOUR: Final = (
    "Is anything {colour}?",
    "Is something in the picture {colour}?",
    "Is the shape {colour}?",
    "Is it {colour}?",
)
GREETINGS: Final = (
    "Hello", "Hi", "Hello!", "Hi there!", "Hey", "Good morning", "Good evening!", "Who are you?", "What are you?",
    "What can you do?", "Hello! What can you do?", "Help", "What is your name?", "How do you work?",
    "Which shapes do you know?", "Tell me a joke.", "What is the capital of France?", "What is 2 + 2?", "Write a poem.",
)  # fmt: skip
THANKS: Final = (
    "Thanks!",
    "Thank you.",
    "Thank you!",
    "Great, thanks",
    "Well done!",
    "Good job",
    "Bye",
    "Goodbye!",
)


class Part(NamedTuple):
    """A shape in a picture."""

    shape: str
    colour: str

    def __str__(self) -> str:
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.shape}"


class Picture(NamedTuple):
    parts: tuple[Part, ...]
    """From left to right."""
    background: str
    seed: int
    """Of all that has no name: places, sizes, turns and shades."""

    def image(self) -> Image.Image:
        return draw(random.Random(self.seed), self.parts, self.background)

    def __str__(self) -> str:
        return sentence(" and ".join(map(str, self.parts)))


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def rgb(colour: str, chosen: random.Random) -> tuple[int, int, int]:
    """Return a colour of this name."""
    hues, saturations, values = (chosen.uniform(*each) for each in HUES[colour])
    red, green, blue = colorsys.hsv_to_rgb(hues % 360 / 360, saturations, values)
    return round(255 * red), round(255 * green), round(255 * blue)


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape in a circle of radius 1, y downwards."""
    if shape == "circle":
        return [(math.cos(step * math.pi / 32), math.sin(step * math.pi / 32)) for step in range(64)]
    if shape == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if shape == "triangle":
        return [(math.sin(angle), -math.cos(angle)) for angle in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
    if shape == "star":
        return [
            (
                (1, 0.42)[step % 2] * math.sin(step * math.pi / 5),
                -(1, 0.42)[step % 2] * math.cos(step * math.pi / 5),
            )
            for step in range(10)
        ]
    if shape == "cross":
        wide, thin = 0.95, 0.3
        corners = [(-thin, -wide), (thin, -wide), (thin, -thin), (wide, -thin), (wide, thin), (thin, thin)]
        return [*corners, *((-x, -y) for x, y in corners)]
    points = []  # a heart
    for step in range(64):
        turn = step * math.pi / 32
        height = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
        points.append((math.sin(turn) ** 3 * 16 / 17, -height / 17))
    return points


def draw(chosen: random.Random, parts: tuple[Part, ...], background: str) -> Image.Image:
    """Draw a picture: the parts from left to right."""
    width, height = chosen.randrange(96, 320), chosen.randrange(96, 320)
    if max(width, height) > 1.7 * min(width, height):
        height = width
    while True:
        behind = rgb(background, chosen)
        colours = [rgb(part.colour, chosen) for part in parts]
        if all(sum(abs(a - b) for a, b in zip(behind, each, strict=True)) > _CONTRAST for each in colours):
            break
    size = (width * _SCALE, height * _SCALE)
    image = Image.new("RGB", size, behind)
    pen = ImageDraw.Draw(image)
    room = width / len(parts)
    for index, (part, colour) in enumerate(zip(parts, colours, strict=True)):
        radius = min(room, height) / 2 * chosen.uniform(0.55, 0.92)
        x = room * index + chosen.uniform(radius, room - radius)
        y = chosen.uniform(radius, height - radius)
        turn = math.radians(chosen.uniform(-14, 14))
        corners = [
            (
                (x + radius * (a * math.cos(turn) - b * math.sin(turn))) * _SCALE,
                (y + radius * (a * math.sin(turn) + b * math.cos(turn))) * _SCALE,
            )
            for a, b in outline(part.shape)
        ]
        pen.polygon(corners, fill=colour)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def picture(chosen: random.Random, count: int | None = None) -> Picture:
    """Return a picture.

    Args:
        count: of its shapes; default: one or two.
    """
    background = "white" if chosen.random() < 0.45 else chosen.choice(COLOURS)
    colours = [colour for colour in COLOURS if colour != background]
    count = count or (1 if chosen.random() < 0.6 else 2)
    parts = tuple(
        Part(shape, colour)
        for shape, colour in zip(chosen.sample(SHAPES, count), chosen.sample(colours, count), strict=True)
    )
    return Picture(parts, background, chosen.getrandbits(32))


def ask(chosen: random.Random, seen: Picture) -> tuple[str, str]:
    """Return a question about a picture, and the answer."""
    parts = seen.parts
    part = chosen.choice(parts)
    kind = chosen.choices(
        ("describe", "colour", "shape", "count", "background", "has shape", "has colour"),
        (8, 4, 4, 1, 2, 2, 2),
    )[0]
    if kind == "describe":
        return chosen.choice(DESCRIBE), str(seen)
    if kind == "colour":
        questions = COLOUR_OF_ONE if len(parts) == 1 else COLOUR_OF_TWO
        return chosen.choice(questions).format(shape=part.shape), sentence(part.colour)
    if kind == "shape":
        questions = SHAPE_OF_ONE if len(parts) == 1 else SHAPE_OF_TWO
        return chosen.choice(questions).format(colour=part.colour), sentence(f"a {part.shape}")
    if kind == "count":
        return chosen.choice(COUNT), ("One.", "Two.")[len(parts) - 1]
    if kind == "background":
        return chosen.choice(BACKGROUND), sentence(seen.background)
    if kind == "has shape":
        shape = part.shape if chosen.random() < 0.5 else chosen.choice(SHAPES)
        return chosen.choice(HAS_SHAPE).format(shape=shape), _yes(any(shape == each.shape for each in parts))
    colour = (
        part.colour
        if chosen.random() < 0.5
        else chosen.choice([each for each in COLOURS if each != seen.background])
    )
    questions = HAS_COLOUR if len(parts) == 1 else HAS_COLOUR[:1]
    return chosen.choice(questions).format(colour=colour), _yes(any(colour == each.colour for each in parts))


def _yes(holds: bool) -> str:
    return "Yes." if holds else "No."


class Turn(NamedTuple):
    question: str
    answer: str
    picture: Picture | None


def varied(chosen: random.Random, question: str) -> str:
    """Return a question as people write it."""
    if chosen.random() < 0.1:
        question = question.lower()
    if chosen.random() < 0.1:
        question = question.rstrip("?.!")
    return question


def first_words(chosen: random.Random) -> list[Turn]:
    """Return a question about one shape, and an answer in which each word is about the picture."""
    seen = picture(chosen, 1)
    return [Turn(varied(chosen, chosen.choice(DESCRIBE)), str(seen), seen)]


def conversation(chosen: random.Random) -> list[Turn]:
    """Return one to three turns."""
    turns: list[Turn] = []
    seen: Picture | None = None
    for _ in range(chosen.choices((1, 2, 3), (6, 3, 1))[0]):
        draws = chosen.random()
        if draws < 0.06:
            thanked = bool(turns) and chosen.random() < 0.5
            question = chosen.choice(THANKS if thanked else GREETINGS)
            answer = "You are welcome." if thanked else ABOUT
            turns.append(Turn(varied(chosen, question), answer, None))
            continue
        shown = None
        if seen is None and draws < 0.12:
            question, answer = ask(chosen, picture(chosen))[0], NO_PICTURE
        else:
            if seen is None or chosen.random() < 0.35:
                seen = shown = picture(chosen)
            question, answer = ask(chosen, seen)
        turns.append(Turn(varied(chosen, question), answer, shown))
    return turns
