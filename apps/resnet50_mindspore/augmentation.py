"""Draw apps/resnet50_mindspore/augmentation.png: what crop and flip make of six images in five epochs.

bash scripts/run_resnet50_mindspore.sh 1 --depth 18 --max-steps 0          # makes .venvs/resnet50_mindspore
.venvs/resnet50_mindspore/bin/python apps/resnet50_mindspore/augmentation.py   # --dataset cifar10 for real ones
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from data import augment, load
from PIL import Image, ImageDraw

SCALE, EDGE, HEAD = 3, 4, 16  # of each image, between images, and above them, in pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="synthetic-cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    options = parser.parse_args()
    training, _ = load(options.dataset, options.data_dir)
    indices = np.arange(6)
    columns = [training.images[indices]]
    columns += [augment(training.images[indices], indices, 1, epoch) for epoch in range(5)]

    side = SCALE * training.images.shape[1] + EDGE
    picture = Image.new("RGB", (len(columns) * side + EDGE, len(indices) * side + EDGE + HEAD), "white")
    draw = ImageDraw.Draw(picture)
    for i, column in enumerate(columns):
        draw.text((i * side + EDGE, 2), f"epoch {i}" if i else "as it is", fill="black")
        for j, image in enumerate(column):
            large = Image.fromarray(image).resize((side - EDGE, side - EDGE), Image.Resampling.NEAREST)
            picture.paste(large, (i * side + EDGE, j * side + EDGE + HEAD))
    picture.save(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
