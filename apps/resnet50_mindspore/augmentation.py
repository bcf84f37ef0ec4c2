"""Draw six images and their crops and flips in five epochs to apps/resnet50_mindspore/augmentation.png.

bash scripts/run_resnet50_mindspore.sh 1 --depth 18 --max-steps 0          # makes .venvs/resnet50_mindspore
.venvs/resnet50_mindspore/bin/python apps/resnet50_mindspore/augmentation.py   # --dataset cifar10 for real images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from data import augment, load
from PIL import Image, ImageDraw

SCALE = 3
EDGE = 4  # width of the space between images, in pixels
HEAD = 16  # height of the titles, in pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="synthetic-cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    options = parser.parse_args()
    training, _ = load(options.dataset, options.data_dir)
    indices = np.arange(6)
    images = training.images[indices]
    columns = {"as it is": images}
    for epoch in range(5):
        columns[f"epoch {epoch + 1}"] = augment(images, indices, seed=1, epoch=epoch)

    size = SCALE * images.shape[1]
    side = size + EDGE
    width = len(columns) * side + EDGE
    height = len(indices) * side + EDGE + HEAD
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    for i, (title, column) in enumerate(columns.items()):
        left = i * side + EDGE
        draw.text((left, 2), title, fill="black")
        for j, image in enumerate(column):
            large = Image.fromarray(image).resize((size, size), Image.Resampling.NEAREST)
            picture.paste(large, (left, j * side + EDGE + HEAD))
    picture.save(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
