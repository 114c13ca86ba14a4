"""What a second witness says of a machine that does not answer us."""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """Nothing, or one of two things; a machine that refuses SSH is as dead to us as one that is off."""

    NOTHING = "nothing"  # nobody was asked, or who was asked could not tell
    ALIVE = "alive"
    DEAD = "dead"


def word_of(exit_code: int, said: str) -> Word:
    """Return the word in the answer of `knock` on a peer; any other answer says nothing."""
    words = {word.value: word for word in Word}
    return words.get(said.strip(), Word.NOTHING) if exit_code == 0 else Word.NOTHING
