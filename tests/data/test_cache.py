"""A cache changes neither batches nor their bits, reads no file twice, and is thrown away when it is not sound."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import support
from data_streams import global_batches, same
from PIL import Image
from record_files_support import write_numbered

from tfdist.data.cache import cache, example_store
from tfdist.data.cache.cache import Cached
from tfdist.data.cache.example_store import ExampleStore
from tfdist.data.formats.array_files import ArrayFiles
from tfdist.data.formats.image_folder import ImageFolder
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.mixture import Mixture
from tfdist.data.sources.source import Source
from tfdist.data.tables.tables import Table
from tfdist.data.text.text import TextLines
from tfdist.errors import UserError
from tfdist.strategies.base import Topology

EXAMPLES, STEPS = 40, 5  # of 8
FEATURES = {"number": ("fixed", (), "int64"), "x": ("fixed", (2,), "float32")}
ROW = [((3,), np.dtype(np.float32))]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(cache, "SHARED_MEMORY", tmp_path / "memory")


def records(folder: pathlib.Path, **settings: Any) -> TFRecordSource:
    if not folder.exists():
        folder.mkdir()
        write_numbered(folder, [17, 0, 23])
    columns = Columns(inputs="x", targets="number")
    return TFRecordSource(files=str(folder / "part-*"), features=FEATURES, columns=columns, block_records=4, **settings)


def images(folder: pathlib.Path, augmented: bool) -> ImageFolder:
    for name in ("ant", "bee"):
        if not (folder / name).exists():
            (folder / name).mkdir(parents=True)
            for i in range(EXAMPLES // 2):
                Image.new("RGB", (5, 6), (i, 7, 200)).save(folder / name / f"{i:02}.png")
    layers = [lambda: keras.layers.RandomBrightness(0.2)] if augmented else []
    return ImageFolder(str(folder), size=(4, 4), augmentation=layers)


def table(folder: pathlib.Path) -> Table:
    folder.mkdir(exist_ok=True)
    path = folder / "rows.csv"
    if not path.exists():
        path.write_text("a,b,c\n" + "".join(f"{i * 0.37},{i % 5},{'uvw'[i % 3]}\n" for i in range(EXAMPLES)))
    columns = Columns(inputs=["a", "c"], targets="b")
    return Table(files=str(path), columns=columns, fitted_on=str(path), standardize=["a"], block_rows=4)


def text(folder: pathlib.Path) -> TextLines:
    folder.mkdir(exist_ok=True)
    path = folder / "lines.tsv"
    if not path.exists():
        path.write_text("".join(f"{'ab'[i % 2]}\t{' '.join(['w'] * (i * 7 % 11 + 1))} n{i}\n" for i in range(EXAMPLES)))
    return TextLines(files=str(path), fitted_on=str(path), bucket_batches=2)


def arrays(folder: pathlib.Path) -> ArrayFiles:
    folder.mkdir(exist_ok=True)
    path = folder / "arrays.npz"
    if not path.exists():
        np.savez(path, x=np.arange(EXAMPLES * 3.0).reshape(EXAMPLES, 3), y=np.arange(EXAMPLES))
    return ArrayFiles(str(path), inputs="x", targets="y")


SOURCES: dict[str, Callable[[pathlib.Path], Source]] = {
    "records": records,
    "images": lambda folder: images(folder, augmented=False),
    "augmented images": lambda folder: images(folder, augmented=True),
    "table": table,
    "text": text,
    "arrays": arrays,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "seed"),
    [(name, where, 5) for name in SOURCES for where in ("memory", "disk")] + [("records", "memory", None)],
)
def test_batches_are_the_same_bits_with_a_cache_in_every_epoch(
    tmp_path: pathlib.Path, name: str, where: str, seed: int | None
) -> None:
    def make() -> Source:
        return SOURCES[name](tmp_path / "data")

    plain = global_batches(make, steps=3 * STEPS, seed=seed)
    for workers in (1, 3):
        kept = global_batches(lambda: Cached(make(), where=where), steps=3 * STEPS, seed=seed, num_workers=workers)
        assert same(kept, plain)


def forget_files(folder: pathlib.Path) -> None:
    """Makes any read of the data fail."""
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_after_one_epoch_of_all_workers_the_files_are_not_read(tmp_path: pathlib.Path, name: str) -> None:
    folder = tmp_path / "data"
    expected = global_batches(lambda: SOURCES[name](folder), steps=3 * STEPS)
    sources = [Cached(SOURCES[name](folder)) for _ in range(3)]
    made = iter(sources)
    global_batches(lambda: next(made), steps=STEPS, num_workers=3)  # each worker reads a third
    later = iter(sources)
    forget_files(folder)
    found = global_batches(lambda: next(later), steps=2 * STEPS, num_workers=3, first_step=STEPS)
    assert same(found, expected[STEPS:])


def test_a_cache_on_disk_serves_later_runs_and_a_changed_file_makes_another(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "data"

    def stores() -> list[str]:
        return sorted(path.name for path in (tmp_path / "cache/tfdist/examples").iterdir() if path.is_dir())

    def make() -> Source:
        return Cached(records(folder), where="disk")

    global_batches(make, steps=STEPS)
    assert (tmp_path / "cache/tfdist/examples" / stores()[0] / "complete").exists()
    global_batches(make, steps=STEPS)
    assert len(stores()) == 1
    global_batches(
        lambda: Cached(records(folder, transform=lambda nest: (nest[0] * 2, nest[1])), where="disk"), steps=1
    )
    assert len(stores()) == 2
    path = folder / "part-000"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))
    global_batches(make, steps=1)
    assert len(stores()) == 3


WRITER = """
import pathlib, sys
import numpy as np
from tfdist.data.cache.example_store import ExampleStore
store = ExampleStore([((3,), np.dtype(np.float32))], 2_000_000, pathlib.Path(sys.argv[1]))
print("open", flush=True)
for first in range(0, 2_000_000, 50):
    numbers = np.arange(first, first + 50)
    store.put(numbers, [np.repeat(numbers[:, None], 3, 1).astype(np.float32)])
"""


def test_what_a_killed_process_had_marked_is_whole(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "store"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, directory], stdout=subprocess.PIPE, env=support.clean_environment()
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout.readline() == b"open\n"
    store = ExampleStore(ROW, 2_000_000, directory)
    while store.num_there < 100_000:
        pass
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    there = np.flatnonzero(store._there)
    assert 100_000 <= len(there) < 2_000_000
    (rows,) = ExampleStore(ROW, 2_000_000, directory).take(there)
    assert np.array_equal(rows, np.repeat(there[:, None], 3, 1).astype(np.float32))


def test_an_unfinished_store_is_thrown_away_when_the_machine_was_started_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.arange(4)
    part = ExampleStore(ROW, 8, tmp_path / "part")
    part.put(numbers, [np.ones((4, 3), np.float32)])
    whole = ExampleStore(ROW, 4, tmp_path / "whole")
    whole.put(numbers, [np.ones((4, 3), np.float32)])
    assert ExampleStore(ROW, 8, tmp_path / "part").num_there == 4
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(example_store, "_BOOT", tmp_path / "boot_id")
    assert ExampleStore(ROW, 8, tmp_path / "part").num_there == 0
    assert ExampleStore(ROW, 4, tmp_path / "whole").has(numbers)


def test_a_store_that_was_being_made_is_made_again(tmp_path: pathlib.Path) -> None:
    ExampleStore(ROW, 8, tmp_path / "part").put(np.arange(4), [np.ones((4, 3), np.float32)])
    (tmp_path / "part" / "store.json").unlink()  # the last file to be made
    assert ExampleStore(ROW, 8, tmp_path / "part").num_there == 0


HOLDER = """
import pathlib, sys
import numpy as np
from tfdist.data.cache.example_store import ExampleStore, hold
directory = pathlib.Path(sys.argv[1])
hold(directory)
ExampleStore([((3,), np.dtype(np.float32))], 8, directory)
print("held", flush=True)
sys.stdin.readline()
"""


def holder(directory: pathlib.Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=support.clean_environment(),
    )
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.mark.slow
def test_memory_is_given_back_by_the_last_worker_or_after_a_kill_by_the_next(tmp_path: pathlib.Path) -> None:
    directory, other = tmp_path / "caches" / "one", tmp_path / "caches" / "two"
    first, second = holder(directory), holder(directory)
    first.communicate(b"\n")
    assert directory.exists()
    second.communicate(b"\n")
    assert not directory.exists()
    killed = holder(directory)
    killed.kill()
    killed.wait()
    assert directory.exists()
    holder(other).communicate(b"\n")
    assert not directory.exists() and not other.exists()


def test_what_does_not_fit_is_said_before_anything_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = records(tmp_path / "data")
    plan = BatchPlan(num_examples=40, global_batch_size=8, num_replicas=1, shuffle_seed=1)
    monkeypatch.setattr(example_store, "SPARE", 1e15)
    with pytest.raises(UserError, match=r"would take 680 bytes, but .* free"):
        build_pipeline(Cached(source, where="disk"), plan, Topology(0, 1, 1))
    kept = Cached(source)  # shared memory has no room either: the process's own is taken
    stream = build_pipeline(kept, plan, Topology(0, 1, 1)).as_numpy_iterator()
    list(itertools.islice(stream, STEPS))
    assert kept._store.num_there == EXAMPLES and not list((tmp_path / "memory").rglob("*.rows"))
    monkeypatch.setattr(cache, "MEMORY_SHARE", 0.0)
    with pytest.raises(UserError, match=r"680 bytes of memory.*Cached.where = 'disk'"):
        build_pipeline(Cached(source), plan, Topology(0, 1, 1))


def test_what_cannot_be_kept_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"Cached.where is one of memory, disk; received 'ram'"):
        Cached(records(tmp_path / "data"), where="ram")
    with pytest.raises(UserError, match=r"Cached.directory is a local directory"):
        Cached(records(tmp_path / "data"), directory="gs://bucket/cache", where="disk")
    path = tmp_path / "names.csv"
    path.write_text("name,y\nann,1\nbob,2\n")
    strings = Table(files=str(path), columns=Columns(inputs="name", targets="y"), strings=["name"])
    with pytest.raises(UserError, match=r"numbers of fixed shapes, and lines of text"):
        Cached(strings)
    plan = BatchPlan(num_examples=4, global_batch_size=2, num_replicas=1)
    with pytest.raises(UserError, match=r"Mixture cannot be cached; cache what it is made of"):
        build_pipeline(Cached(Mixture([lambda: (np.zeros(4), np.zeros(4))])), plan, Topology(0, 1, 1))


@pytest.mark.slow
def test_a_shared_memory_that_others_prepared_is_left_alone(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "memory" / f"tfdist-{os.getuid()}"
    base.mkdir(mode=0o700)
    base.chmod(0o777)
    (base / "theirs").mkdir()
    drawn = global_batches(lambda: Cached(records(tmp_path / "records")), steps=1)
    assert len(drawn) == 1
    assert [each.name for each in base.iterdir()] == ["theirs"]
    assert "others may use it (mode 0777)" in caplog.text
