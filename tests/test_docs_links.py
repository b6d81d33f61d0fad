"""Links of the documentation lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "e2e/*.md",
        "conformance/*.md",
        "tests/attack/*.md",
        "models/argosy-tiny/*.md",
    )
    for path in ROOT.glob(pattern)
)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"`([\w./-]+\.(?:py|h|cc|c|yaml|sh))(?:: \w+)?`")
_FOLDERS = (
    "images",
    "protocol",
    "batch",
    "engine",
    "router",
    "operator",
    "cli",
    "fetcher",
    "crds",
    "charts",
    "bench",
    "conformance",
    "build_hooks",
    "tests",
)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def without_code(text: str) -> str:
    """A page's text without its code blocks."""
    return _FENCED.sub("", text)


@cache
def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them; of equal headings the first."""
    headings = _HEADING.findall(without_code(page.read_text("utf-8")))
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links of a page's text that lead to no file of the repository, or to no heading of it."""
    broken = []
    for link in _LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def test_links_lead_somewhere() -> None:
    broken = {str(page.relative_to(ROOT)): broken_links(page.read_text("utf-8"), page) for page in PAGES}
    assert {page: links for page, links in broken.items() if links} == {}


@pytest.mark.parametrize("name", ["architecture.md", "where-to-look.md", "decisions/*.md"])
def test_files_that_pages_name_exist(name: str) -> None:
    files = {f"/{path.relative_to(ROOT)}" for folder in _FOLDERS for path in (ROOT / folder).rglob("*.*")}
    text = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob(name))
    named = {file.replace("/.../", "/") for file in _FILE.findall(text)}
    ends = {file.removeprefix("router/").removeprefix("engine/") for file in named}
    assert len(ends) > 10
    assert {end for end in ends if not any(file.endswith(f"/{end}") for file in files)} == set()


def missing_files(text: str) -> list[str]:
    """Files that a text names and that do not exist.

    A name is a path from the root, or one from the folder of the path before it, or from a folder above that.
    """
    folder, missing = ROOT, []
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|jsonl|txt))`", text):
        path = ROOT / name
        above = [ROOT / name, *(each / name for each in (folder, *folder.parents) if each != ROOT)]
        found = next((each for each in above if each.exists()), None)
        if found is None and not path.stem.startswith("NAME"):
            missing.append(name)
        else:
            folder = (found or path).parent
    return missing


def test_files_that_contributors_are_sent_to_exist() -> None:
    """Each of two parts may have a file of one name, so the end of a path is not enough."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert missing_files(text) == []
    assert missing_files("`router/argosy_router/config.py`, `server.py`, `auth/api_keys.py`") == []
    assert missing_files("`protocol/argosy_protocol/openai.py`, `messages.py`") == ["messages.py"]


def test_the_test_that_contributors_try_first_runs() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    path, word = re.findall(r"pytest (tests/\S+\.py) -k (\w+)", text)[0]
    assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text("utf-8"), re.MULTILINE)


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    links = _LINK.findall(without_code(index.read_text("utf-8")))
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index} <= linked


def test_links_that_lead_nowhere_are_found() -> None:
    text = """\
[one](SECURITY.md#reporting-a-vulnerability) [two](docs) ![three](docs/no.png) [four](SECURITY.md#no-such-heading)
[five](../elsewhere.md) [six](https://example.com/no)
```
[seven](in-code.md)
```
"""
    nowhere = ["docs/no.png", "SECURITY.md#no-such-heading", "../elsewhere.md"]
    assert broken_links(text, ROOT / "README.md") == nowhere
