"""Writes made-up reviews, label<TAB>text, to data/reviews: what sentiment.gin reads where you have none of your own."""

import itertools
import pathlib
import random

WORDS = {"bad": ["dull", "a waste of time", "badly made", "too long"], "good": ["a delight", "great", "moving", "fun"]}
THINGS = ["The film", "This book", "The game", "Her new song", "The last episode", "The play"]
TURNS = ["was", "is really", "turned out to be", "was, to my surprise,"]
ENDS = ["from start to end.", "and I told everyone so.", "as my friends had said.", "all in all."]


def main() -> None:
    """Every combination once; a fifth of them is for testing."""
    lines = [
        f"{label}\t{' '.join(words)}"
        for label, phrases in WORDS.items()
        for words in itertools.product(THINGS, TURNS, phrases, ENDS)
    ]
    random.Random(0).shuffle(lines)
    directory = pathlib.Path("data/reviews")
    directory.mkdir(parents=True, exist_ok=True)
    cut = len(lines) // 5
    for name, some in {"test": lines[:cut], "train": lines[cut:]}.items():
        (directory / f"{name}.tsv").write_text("\n".join(some) + "\n")


if __name__ == "__main__":
    main()
