"""Run the app's ResNet-50 in a separate process. test_depth_50.py starts this program and torchvision_side.py.

    python mindspore_side.py FOLDER

For each file of weights `<name>-<size>.safetensors` in FOLDER, the program writes a file of that name to FOLDER/told.
Its "images" are the first 16 test images as inputs of the model, float32 [16, 3, size, size]. Its "logits" are the
model's outputs for these images and weights. `told/first-step.safetensors` has the app's initial weights of seed 1, and
its first two training images at 224 x 224.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "apps" / "resnet50_mindspore"))

import distributed  # type: ignore[import-not-found]
from data import load  # type: ignore[import-not-found]
from model import build_model  # type: ignore[import-not-found]
from safetensors.numpy import save_file
from samestep import checkpoint
from samestep.sharding import GlobalBatches
from weights import load_model, model_arrays  # type: ignore[import-not-found]


def main(folder: Path) -> None:
    distributed.choose_device("cpu")
    training, test = load("synthetic-cifar10", folder)
    model = build_model(50, False, seed=1)
    batch = training.training(GlobalBatches(len(training.labels), 2, seed=1), range(1), 224)
    images, labels, _ = (column.asnumpy() for column in next(batch.create_tuple_iterator(num_epochs=1)))
    target = folder / "told"
    target.mkdir()
    save_file({"images": images, "labels": labels, **model_arrays(model)}, target / "first-step.safetensors")

    model.set_train(False)
    for weights in folder.glob("*-*.safetensors"):
        load_model(model, checkpoint.load_weights(weights))
        rows = test.evaluation(0, 16, 16, int(weights.stem.rpartition("-")[2]))
        tensor = next(rows.create_tuple_iterator(num_epochs=1))[0]
        save_file({"images": tensor.asnumpy(), "logits": model(tensor).asnumpy()}, target / weights.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # end without waiting for MindSpore's threads
