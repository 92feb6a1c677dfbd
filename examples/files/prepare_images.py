#!/usr/bin/env python3
"""Writes scikit-learn's handwritten digits as a folder of images and as array files, for the examples that read them.

    python -m tfdist.examples.files.prepare_images              # below data/
    python -m tfdist.examples.files.prepare_images --out=DIR

Makes DIR/digits_images/{train,test}/CLASS/NUMBER.png and DIR/digits_{train,test}.npz with the arrays `images`
(float32 [n, 8, 8, 1]) and `labels`. The splits are those of `tfdist.data.sources.sklearn_sets.load_digits`.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
from PIL import Image

from tfdist.data.sources.sklearn_sets import load_digits


def write(out: pathlib.Path) -> None:
    for split in ("train", "test"):
        images, labels = load_digits(split=split)
        pixels = np.round(images * 255).astype(np.uint8)
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            directory = out / "digits_images" / split / str(label)
            directory.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[:, :, 0]).save(directory / f"{number:04}.png")
        np.savez(out / f"digits_{split}.npz", images=images, labels=labels)
        print(f"{len(labels):,} images: {out / 'digits_images' / split}, {out / f'digits_{split}.npz'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data"), help="default: data/")
    write(parser.parse_args().out)
