"""Reads the most used words of WordNet 3.0 and turns them into conversations about what words mean.

The data files come from Debian's package ``wordnet-base`` (/usr/share/wordnet). Their format is described in
``wndb(5WN)`` and ``cntlist(5WN)``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS_OF_SPEECH = {"noun": "n", "verb": "v", "adjective": "a", "adverb": "r"}
FILE_SUFFIX = {"noun": "noun", "verb": "verb", "adjective": "adj", "adverb": "adv"}
SENSE_TYPES = {"1": "noun", "2": "verb", "3": "adjective", "4": "adverb", "5": "adjective"}
LEFT_OUT = ("offensive", "disparag", "vulgar", "obscene", "slur", "sexual", "derogat", "slang", "genital", "copulat")
"""A gloss with one of these words is not taught."""

GREETINGS = ("Hello", "Hi", "hello", "hi there", "Hey", "Good morning", "Hello!", "Hi!")
INTRODUCTION = "Hello! I am Wordbook, a tiny dictionary. Ask me what a word means."
WHO = ("Who are you?", "What are you?", "What can you do?", "Introduce yourself.", "help", "Help")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are a dictionary.", "Answer in one sentence.")


@dataclass(frozen=True, slots=True)
class Entry:
    """One word with its most used sense. ``uses`` counts how often that sense was met in WordNet's tagged text."""

    word: str
    part_of_speech: str
    gloss: str
    example: str
    synonyms: tuple[str, ...]
    uses: int

    @property
    def definition(self) -> str:
        return f"{self.word} ({self.part_of_speech}): {self.gloss}."


def load_entries(folder: Path, limit: int) -> list[Entry]:
    """The ``limit`` most used words of WordNet in ``folder``, each with its dominant sense, most used first."""
    uses = _uses(folder)
    best: dict[str, Entry] = {}
    for part_of_speech in PARTS_OF_SPEECH:
        data = (folder / f"data.{FILE_SUFFIX[part_of_speech]}").read_bytes()
        for word, offset in _first_senses(folder, part_of_speech):
            count = uses.get((word, part_of_speech), 0)
            if not count or (word in best and best[word].uses >= count):
                continue
            entry = _read_synset(data, offset, word, part_of_speech, count)
            if entry is not None:
                best[word] = entry
    return sorted(best.values(), key=lambda entry: (-entry.uses, entry.word))[:limit]


def _uses(folder: Path) -> dict[tuple[str, str], int]:
    """Highest tag count over the senses of (word, part of speech)."""
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense_key, _, count = line.split()
        word, _, lexical = sense_key.partition("%")
        key = (word, SENSE_TYPES[lexical[0]])
        counts[key] = max(counts.get(key, 0), int(count))
    return counts


def _first_senses(folder: Path, part_of_speech: str) -> Iterator[tuple[str, int]]:
    """(word, byte offset of its most used synset) for every single word of plain letters."""
    for line in (folder / f"index.{FILE_SUFFIX[part_of_speech]}").read_text().splitlines():
        fields = line.split()
        if line.startswith(" ") or not fields[0].isascii() or not fields[0].isalpha() or len(fields[0]) < 2:
            continue
        num_synsets = int(fields[2])
        yield fields[0], int(fields[-num_synsets])


def _read_synset(data: bytes, offset: int, word: str, part_of_speech: str, uses: int) -> Entry | None:
    line = data[offset : data.index(b"\n", offset)].decode("latin-1")
    head, _, text = line.partition(" | ")
    fields = head.split()
    num_words = int(fields[3], 16)
    words = [fields[4 + 2 * i].partition("(")[0].replace("_", " ") for i in range(num_words)]
    gloss, _, rest = text.strip().partition('; "')
    gloss = gloss.split(";")[0].strip()
    if not 8 <= len(gloss) <= 160 or any(part in text for part in LEFT_OUT):
        return None
    spoken = next((candidate for candidate in words if candidate.lower() == word), word)
    synonyms = tuple(candidate for candidate in words if candidate.lower() != word)
    example = rest.split('"')[0].strip()
    return Entry(spoken, part_of_speech, gloss, example if 8 <= len(example) <= 120 else "", synonyms[:3], uses)


def question(entry: Entry, rng: random.Random) -> str:
    """One of the ways people ask what a word means."""
    word = entry.word.capitalize() if rng.random() < 0.2 else entry.word
    article = "an" if word[0].lower() in "aeiou" else "a"
    return rng.choice(
        (
            f"What is {word}?",
            f"What is {article} {word}?",
            f"what is {word}",
            f"What does {word} mean?",
            f"What does '{word}' mean?",
            f'What does the word "{word}" mean?',
            f"What is the meaning of {word}?",
            f"Define {word}.",
            f"Define {word}",
            f"define {word}",
            f"Define the word {word}.",
            f"Tell me about {word}.",
            f"Explain {word}.",
            f"Explain the word '{word}'.",
            f"{word}",
            f"{word}?",
        )
    )


def turn(entries: list[Entry], rng: random.Random) -> tuple[str, str]:
    """One (question, answer)."""
    chance = rng.random()
    if chance < 0.01:
        return rng.choice(GREETINGS), INTRODUCTION
    if chance < 0.02:
        return rng.choice(WHO), INTRODUCTION
    if chance < 0.03:
        nonsense = "".join(rng.choice("bcdfghjklmnpqrstvwxyz") for _ in range(rng.randint(5, 9)))
        return f"What is {nonsense}?", "I do not know that word."
    entry = rng.choice(entries)
    if chance < 0.08 and entry.synonyms:
        return f"What is another word for {entry.word}?", f"Another word for {entry.word} is {entry.synonyms[0]}."
    if chance < 0.13 and entry.example:
        return f"Use {entry.word} in a sentence.", entry.example
    return question(entry, rng), entry.definition
