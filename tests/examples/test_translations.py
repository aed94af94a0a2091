"""Each Chinese page says what its English page says, as far as that can be counted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples.test_documentation import PAGES, ROOT

CHINESE = ".zh-CN.md"
ENGLISH_ONLY = {
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/reference/options.md",  # made from the declarations
}
BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
TERM = re.compile(r"`([^`]+)`")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

each_chinese_page = pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if page.name.endswith(CHINESE)
    ],
)


class Section(NamedTuple):
    """What a heading and the text below it have in both languages.

    Attributes:
        level: of the heading; 0 for what stands before the first one.
        blocks: fenced, without comments.
        rows: of tables.
        items: of lists.
        paragraphs: parts between empty lines, blocks among them.
        terms: what is set as code in the text.
        links: what pages and addresses it leads to.
    """

    level: int
    blocks: list[str]
    rows: int
    items: int
    paragraphs: int
    terms: set[str]
    links: list[str]


def english(page: Path) -> Path:
    """The English page of a Chinese one."""
    return page.with_name(page.name.replace(CHINESE, ".md"))


def chinese(page: Path) -> Path:
    """Where the Chinese page of an English one is, or would be."""
    return page.with_name(page.name.removesuffix(".md") + CHINESE)


def sections(page: Path) -> list[Section]:
    """The page cut at its headings."""
    content = page.read_text(encoding="utf-8")
    blocks = iter([without_comments(block) for block in BLOCK.findall(content)])
    parts = re.split(r"^(?=#+ )", BLOCK.sub("```", content), flags=re.M)
    return [section(part, [next(blocks) for _ in range(part.count("```"))]) for part in parts]


def section(text: str, blocks: list[str]) -> Section:
    """The section with this text, in which a mark stands for each of the blocks."""
    return Section(
        level=len(text) - len(text.lstrip("#")),
        blocks=blocks,
        rows=len(re.findall(r"^\|", text, re.M)),
        items=len(re.findall(r"^- ", text, re.M)),
        paragraphs=len(re.findall(r"\n\n+(?=\S)", text)),
        terms={" ".join(term.split()) for term in TERM.findall(text.replace("```", ""))},
        links=sorted(LINK.findall(text)),
    )


def without_comments(block: str) -> str:
    """A block as both languages have it; of a list of files (`text`) the files are left."""
    comment = r"(?<=\S) +.*" if block.startswith("```text\n") else r"\s*#.*"
    return re.sub(comment, "", block)


def numbers(page: Path) -> Counter[str]:
    """The numbers in the text of a page."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return Counter(NUMBER.findall(LINK.sub("]", TERM.sub("", text))))


def in_chinese(link: str, page: Path) -> str:
    """Where a link of an English page leads on the Chinese one; the language link comes back."""
    target = page.parent / link
    if target == chinese(page):
        return page.name
    if target.suffix == ".md" and chinese(target).exists():
        return str(Path(link).with_name(chinese(target).name))
    return link


def test_the_other_pages_have_a_chinese_version() -> None:
    """A new page comes in both languages."""
    alone = {
        str(page.relative_to(ROOT))
        for page in PAGES
        if not page.name.endswith(CHINESE) and not chinese(page).exists()
    }
    assert alone == ENGLISH_ONLY


@each_chinese_page
def test_pages_of_both_languages_have_the_same_parts(page: Path) -> None:
    """Sections with the same blocks, tables, lists, paragraphs, code and links in each.

    The Chinese page links to Chinese pages, and both link to each other.
    """
    original = english(page)
    expected = [
        part._replace(links=sorted(in_chinese(link, original) for link in part.links))
        for part in sections(original)
    ]
    assert sections(page) == expected
    assert page.name in LINK.findall(original.read_text(encoding="utf-8"))


@each_chinese_page
def test_numbers_are_the_same_in_both_languages(page: Path) -> None:
    """Every number of the English text is in the Chinese one, as often or more: 两 may be 2."""
    assert numbers(english(page)) <= numbers(page)
