"""What the documents point at is there: links, their headings, and the paths of files that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
BASES = ("", "kvstore/")
"""Where a path that a document names begins."""
FOLDERS = {path.name for base in BASES for path in (ROOT / base).iterdir() if path.is_dir()}
LINES_OF_THE_OVERVIEW = 200


@cache
def text_of(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(document: Path) -> set[str]:
    """The anchors that a document's headings have on its page."""
    titles = re.findall(r"^#+ (.*)$", text_of(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def paths_in(text: str) -> list[str]:
    """What is in backquotes and looks like a path of this repository; it may have wildcards."""
    quoted = re.findall(r"`([\w./*-]+)`", text)
    return [
        each
        for each in quoted
        if not each.startswith(("/", "."))
        and (each.endswith((".py", ".md", ".proto")) or ("/" in each and each.partition("/")[0] in FOLDERS))
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = text_of(ROOT / document)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in headings(target), f"{document}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    missing = [
        path
        for path in paths_in(text_of(ROOT / document))
        if not any(next(ROOT.glob(base + path), None) for base in BASES)
    ]
    assert not missing, document


def test_the_overview_is_read_in_one_go() -> None:
    lines = (ROOT / "docs/architecture/overview.md").read_text().splitlines()
    assert len(lines) <= LINES_OF_THE_OVERVIEW
