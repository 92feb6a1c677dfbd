"""Lines of text: little padding with buckets, one vocabulary for all splits, one message for whatever is wrong."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_streams import global_batches, same

from tfdist.data.text.text import TextLines
from tfdist.errors import UserError


def write_numbered(folder: pathlib.Path, sizes: Sequence[int]) -> str:
    """Lines whose first word is their number, of very different lengths."""
    draw, number = np.random.default_rng(0), itertools.count()
    for i, size in enumerate(sizes):
        words = [["word"] * int(n) for n in draw.gamma(1.0, 12.0, size)]
        lines = [f"{'even' if (n := next(number)) % 2 == 0 else 'odd'}\tn{n} {' '.join(w)}\n" for w in words]
        (folder / f"part-{i}.tsv").write_text("".join(lines))
    return str(folder / "part-*.tsv")


def lines(files: Any, **settings: Any) -> TextLines:
    return TextLines(**{"files": files, "fitted_on": files, "vocabulary_size": 10_000} | settings)


@pytest.mark.slow
def test_buckets_pad_less_than_a_third_as_much(tmp_path: pathlib.Path) -> None:
    files = write_numbered(tmp_path, [900, 300])
    for_each_word = {}
    for bucket_batches in (0, 25):
        source = lines(files, bucket_batches=bucket_batches)
        ids = [ids for ids, _ in global_batches(lambda source=source: source, steps=100, batch_size=12)]
        words = sum(np.count_nonzero(each) for each in ids)
        for_each_word[bucket_batches] = sum(each.size for each in ids) / words - 1
    assert for_each_word[25] < for_each_word[0] / 3


def test_a_vocabulary_is_kept_with_the_run_and_serves_every_split(tmp_path: pathlib.Path) -> None:
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_text("b\tOne, two two three!\na\tthree\n\n")
    test.write_text("a\tthree four, two - TWO one\r\n")
    source = TextLines(files=str(test), fitted_on=str(train))
    source.prepare(str(tmp_path / "fitted"))
    assert source.vocabulary == lines(str(train)).vocabulary
    assert source.labels == ["a", "b"]
    ((ids, labels),) = global_batches(lambda: source, steps=1, batch_size=1, seed=None)
    known = {word: i for i, word in enumerate(source.vocabulary, start=2)}
    assert ids.tolist() == [[known["three"], 1, known["two"], known["two"], known["one"], 0]]
    assert labels.tolist() == [0]
    train.write_text("b\tother words\na\tnow\n")
    again = TextLines(files=str(test), fitted_on=str(train))
    again.prepare(str(tmp_path / "fitted"))
    assert again.vocabulary == source.vocabulary
    train.write_text("a\tother\nc\twords\n")
    with pytest.raises(UserError, match=r"begun with the labels \['a', 'b'\].*now give \['a', 'c'\]"):
        TextLines(files=str(test), fitted_on=str(train)).prepare(str(tmp_path / "fitted"))


def test_characters_of_one_length(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.tsv").write_text("yes\tab\nyes\tabc\nno\tbä\n")
    files = str(tmp_path / "a.tsv")
    source = lines(files, split="character", max_length=5, pad_to_max=True)
    assert source.structure[0] == tf.TensorSpec([None, 5], tf.int32)
    ((ids, labels),) = global_batches(lambda: source, steps=1, batch_size=3, seed=None, pad=True)
    assert (ids > 0).sum(axis=1).tolist() == [2, 3, 2]
    assert labels.tolist() == [1, 1, 0]
    with pytest.raises(UserError, match=r"needs batches of one shape.*TextLines.pad_to_max = True"):
        global_batches(lambda: lines(files), steps=1, batch_size=3, pad=True)


def test_a_byte_order_mark_belongs_to_no_label_and_no_word(tmp_path: pathlib.Path) -> None:
    mark, words = b"\xef\xbb\xbf", b"0\tgood film\r\n1\tbad film\r\n0\tgood play\r\n"
    for name, content in (("plain", words), ("marked", mark + words)):
        (tmp_path / name).write_bytes(content)
    plain, marked = (lines(str(tmp_path / name)) for name in ("plain", "marked"))
    assert marked.labels == plain.labels == ["0", "1"] and marked.vocabulary == plain.vocabulary
    assert same(*(global_batches(lambda each=each: each, steps=1, batch_size=3) for each in (plain, marked)))


def test_what_is_wrong_gets_a_message(tmp_path: pathlib.Path) -> None:
    def file(name: str, content: str) -> str:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        return str(tmp_path / name)

    good = file("good.tsv", "sun\tshines\nrain\tfalls\n")
    for make, message in (
        (lambda: lines(file("a.tsv", "sun\tup\n\nmoon up\n")), r"a\.tsv:3 has no '\\t': 'moon up'. A line is a label"),
        (lambda: lines(file("b.tsv", "sun\t \n")), r"b\.tsv:1 has no text"),
        (lambda: lines(file("c.tsv", "\n"), fitted_on=good), "have no lines"),
        (lambda: lines(str(tmp_path / "none-*")), "No file matches"),
        (lambda: lines(file("d.tsv", "sun\tx\nrian\tx\n"), fitted_on=good), r"d\.tsv:2: .*'rian'.*Did you mean 'rain'"),
        (lambda: lines(file("e.tsv", "a\tx\nb\tcafé\n")), r"e\.tsv:2 is not UTF-8: .*Write the file in UTF-8"),
        (lambda: lines(file("f.tsv", "a\t!!!\nb\t?\n")).describe(), "have no words: tfdist.TextLines.standardize = "),
        (lambda: lines(good, labels="sun"), "TextLines.labels is 'sun'; write a list"),
        (lambda: lines(good, labels=["sun"]), "the label 'rain' is not among"),
        (lambda: lines(good, vocabulary_size=2), "TextLines.vocabulary_size is 2; write a whole number of at least 3"),
        (lambda: lines(good, split="words"), "TextLines.split is 'words'; write one of 'whitespace'"),
    ):
        with pytest.raises(UserError, match=message):
            make()
