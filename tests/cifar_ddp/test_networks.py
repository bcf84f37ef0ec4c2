"""Compare each network of model.py with torchvision's, or with a network that this file writes out layer by layer."""

from __future__ import annotations

from harness import told_by

PROGRAM = """
import json

import torch
from model import CLASSES, build_model
from options import parse
from torch import nn
from vision import models

told = {}
images = torch.randn(2, 3, 64, 64)
for name in ("resnet18", "resnet50"):
    ours = build_model(parse([f"--model={name}", "--stem=imagenet"]), torch.float32).eval()
    theirs = getattr(models, name)(num_classes=CLASSES)
    theirs.load_state_dict(ours.state_dict())  # strictly: all names and shapes
    with torch.inference_mode():
        told[name] = (ours(images) - theirs.eval()(images)).abs().max().item()
trained = ["--model=resnet18", "--model=resnet18 --norm=group", "--model=resnet18 --freeze-bn --stem=imagenet"]
for words in trained:
    model = build_model(parse(words.split()), torch.float64)
    model(images[:, :, :32, :32].double()).sum().backward()
    told[words] = all(parameter.grad.isfinite().all().item() for parameter in model.parameters())

layers = []
channels = 3
for width in (32, 64, 128, 128):
    layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
theirs = nn.ModuleDict({"features": nn.Sequential(*layers), "fc": nn.Linear(channels, CLASSES)}).double()
ours = build_model(parse(["--model=small", "--dropout=0"]), torch.float64)
theirs.load_state_dict(ours.state_dict())
images = images[:, :, :32, :32].double()
scores = theirs["fc"](theirs["features"](images).mean((2, 3)))
told["small"] = (ours(images) - scores).abs().max().item()
told["parameters"] = sum(parameter.numel() for parameter in ours.parameters()) - 129 * CLASSES
print(json.dumps(told))
"""


def test_the_resnets_are_torchvisions_and_the_small_network_is_the_one_written_out() -> None:
    reported = told_by("cifar_ddp", PROGRAM)
    assert max(reported.pop("resnet18"), reported.pop("resnet50")) < 1e-4
    assert reported.pop("small") < 1e-12
    assert reported.pop("parameters") == 242_474 - 129 * 10  # each class adds 128 weights and a bias
    assert all(reported.values())
