"""Compare the program and its steps with mnist_ddp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness import ROOT, Harness, losses, relative_difference


def test_the_migration_from_ddp_is_short(tmp_path: Path) -> None:
    apps = ROOT / "apps"
    command = ["diff", str(apps / "mnist_ddp" / "train.py"), str(apps / "mnist_horovod" / "train.py")]
    diff = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    changed = [line for line in diff.splitlines() if line.startswith(("<", ">"))]
    assert 0 < len(changed) <= 40
    for name in ("model.py", "data.py"):
        assert (apps / "mnist_ddp" / name).read_bytes() == (apps / "mnist_horovod" / name).read_bytes()


@pytest.mark.soak  # the quick tests compare losses with mnist_ddp (tests/conformance), and mnist_lightning's bits
def test_with_virtual_ranks_it_ends_with_the_bits_of_mnist_ddp(harness: Harness, ddp: Harness) -> None:
    options = ["--dataset=mnist-5k", "--global-batch-size=251", "--max-steps=20", "--virtual-ranks=5", "--log-every=1"]
    ours = harness.train(3, *options)
    reference = ddp.train(1, *options)
    assert ours["weights_sha256"] == reference["weights_sha256"]
    assert losses(harness.folder / "run") == losses(ddp.folder / "run")


@pytest.mark.soak  # the quick tests compare losses with mnist_ddp (tests/conformance)
@pytest.mark.parametrize("batch", [125, 1333])  # neither 2 nor 3 divides them; 1333 leaves a last batch of one
def test_the_losses_are_those_of_ddp(harness: Harness, ddp: Harness, batch: int) -> None:
    for variant in harness.app.variants[:2]:
        options = [*harness.app.exact, *variant, f"--global-batch-size={batch}"]
        steps = 100 if batch == 125 and variant == harness.app.variants[0] else 12
        ddp.train(1, *options, f"--max-steps={steps}", run_dir=ddp.folder / f"{variant}")
        expected = losses(ddp.folder / f"{variant}")
        assert len(expected) == steps
        for n in (1, 2, 3):
            run_dir = harness.folder / f"{variant}-{n}"
            harness.train(n, *options, f"--max-steps={steps}", run_dir=run_dir)
            assert relative_difference(expected, losses(run_dir)) < 1e-9, (variant, n)


@pytest.mark.soak  # the quick tests compare losses in float64 (tests/conformance)
def test_ddp_at_the_same_number_of_ranks_takes_the_same_steps(harness: Harness, ddp: Harness) -> None:
    """The runs use float32 on 3 ranks and draw equal dropout masks, so losses differ only by rounding."""
    options = ["--dataset=mnist-5k", "--max-steps=10", "--log-every=1", "--global-batch-size=100"]
    one = harness.train(3, *options)
    other = ddp.train(3, *options)
    assert relative_difference(losses(Path(one["run_dir"])), losses(Path(other["run_dir"]))) < 1e-5


@pytest.mark.soak  # the quick tests load torch's weights in Paddle and MindSpore (tests/conformance)
def test_weights_go_from_ddp_to_horovod_and_back(harness: Harness, ddp: Harness) -> None:
    trained = ddp.train(2, "--dataset=mnist-5k", "--epochs=2")
    weights = Path(trained["run_dir"]) / "model.safetensors"
    evaluate = ["--dataset=mnist-5k", "--max-steps=0"]
    taken = harness.train(3, *evaluate, f"--init-from={weights}", run_dir=harness.folder / "taken")
    assert taken["weights_sha256"] == trained["weights_sha256"]
    assert taken["test_accuracy"] == trained["test_accuracy"]
    back = ddp.train(1, *evaluate, f"--init-from={taken['run_dir']}/model.safetensors", run_dir=ddp.folder / "back")
    assert back["test_accuracy"] == trained["test_accuracy"]


@pytest.mark.soak  # the quick tests compare losses with mnist_ddp (tests/conformance)
def test_a_rank_without_samples_takes_part(harness: Harness, ddp: Harness) -> None:
    options = [*harness.app.exact, "--global-batch-size=2", "--max-steps=10"]
    one = harness.train(3, *options)
    other = ddp.train(1, *options)
    assert relative_difference(losses(Path(one["run_dir"])), losses(Path(other["run_dir"]))) < 1e-9
