"""BERT's uncased tokenizer: split into words, then each word into the longest known pieces."""

from __future__ import annotations

import unicodedata
from pathlib import Path

MAX_TOKENS = 256
MAX_WORD = 100  # characters; a longer word is unknown

# CJK characters are words of their own. Blocks of Unicode, first and last code point.
CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """The vocabulary and what is made of it."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").split("\n")
        self.ids = {word: number for number, word in enumerate(words) if word}
        self.unknown, self.begin, self.end = (
            self.ids[word] for word in ("[UNK]", "[CLS]", "[SEP]")
        )

    def encode(self, text: str) -> list[int]:
        """Token numbers, at most MAX_TOKENS, with the marks for begin and end."""
        tokens = [token for word in split_words(text) for token in self.pieces(word)]
        return [self.begin, *tokens[: MAX_TOKENS - 2], self.end]

    def pieces(self, word: str) -> list[int]:
        """The word as the longest pieces from left to right."""
        if len(word) > MAX_WORD:
            return [self.unknown]
        tokens, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for stop in range(len(word), start, -1):
                number = self.ids.get(prefix + word[start:stop])
                if number is not None:
                    break
            else:
                return [self.unknown]
            tokens.append(number)
            start = stop
        return tokens


def split_words(text: str) -> list[str]:
    """Lower case without accents; punctuation and CJK characters stand alone."""
    spaced = "".join(f" {c} " if is_cjk(c) else " " if c.isspace() else c for c in text)
    plain = unicodedata.normalize("NFD", spaced.lower())
    words = []
    word = ""
    for character in plain:
        category = unicodedata.category(character)
        if category == "Mn" or (category.startswith("C") and not character.isspace()):
            continue  # accents and control characters
        if character.isspace() or is_punctuation(character):
            if word:
                words.append(word)
            word = ""
            if not character.isspace():
                words.append(character)
        else:
            word += character
    return [*words, word] if word else words


def is_cjk(character: str) -> bool:
    """Whether it is a Chinese character (also used in Japanese and Korean)."""
    return any(first <= ord(character) <= last for first, last in CJK_BLOCKS)


def is_punctuation(character: str) -> bool:
    """Unicode punctuation, and every ASCII character that is neither letter nor digit."""
    ascii_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    return (ascii_symbol and character != " ") or unicodedata.category(character).startswith("P")
