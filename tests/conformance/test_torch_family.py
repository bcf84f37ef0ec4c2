"""Test that three torch programs take the same steps, and start from each other's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from amounts import amount
from harness import Harness, app_spec, losses, relative_difference

NAMES = ("mnist_ddp", "mnist_horovod", "mnist_lightning")
EXACT = ["--dataset=mnist-5k", "--dtype=float64", "--log-every=1", "--epochs=100"]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[dict[str, Harness]]:
    made = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        made[name] = Harness(app_spec(name), "cpu", tmp_path / name)
    yield made
    for harness in made.values():
        harness.check_nothing_left()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(["--model=net", "--optimizer=sgd"], id="net-sgd"),
        pytest.param(["--model=lenet", "--optimizer=adam"], id="lenet-adam", marks=pytest.mark.soak),
    ],
)
def test_the_torch_programs_have_the_same_losses(family: dict[str, Harness], soak: bool, variant: list[str]) -> None:
    """Losses agree on 3 ranks, although two ranks have no sample in the last batch of an epoch.

    Neither 2 nor 3 divides the global batch. tests/common compares losses of mnist_ddp, and tests/mnist_lightning
    compares losses of mnist_lightning.
    """
    batch = amount(soak, few=1333, many=125)
    steps = amount(soak, few=5, many=100)

    def curve(name: str, n: int) -> list[float]:
        run_dir = family[name].folder / str(n)
        family[name].train(n, *EXACT, *variant, f"--global-batch-size={batch}", f"--max-steps={steps}", run_dir=run_dir)
        return losses(run_dir)

    expected = curve("mnist_ddp", 1)
    assert len(expected) == steps
    for name in amount(soak, few=NAMES[1:2], many=NAMES[1:]):
        for n in amount(soak, few=(3,), many=(1, 2, 3)):
            assert relative_difference(expected, curve(name, n)) < 1e-7, (name, n)


@pytest.mark.soak  # the quick tests exchange weights between torch, Paddle and MindSpore
def test_weights_of_each_program_start_the_others(family: dict[str, Harness]) -> None:
    """Each program starts from the previous program's weights. All three have the same accuracy with equal weights."""
    weights: list[str] = []
    for harness in family.values():
        result = harness.train(1, *harness.app.small, "--max-steps=8", *weights)
        weights = [f"--init-from={Path(result['run_dir']) / 'model.safetensors'}"]
    for harness in [*family.values()][:-1]:  # these apps evaluate the last app's weights
        again = harness.train(1, *harness.app.small, "--max-steps=0", *weights, run_dir=harness.folder / "again")
        assert again["weights_sha256"] == result["weights_sha256"]
        assert again["test_accuracy"] == result["test_accuracy"]
