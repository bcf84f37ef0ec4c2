"""Test the options that all apps share: each mistake is one error line that names its option."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from samestep import ConfigError, options
from samestep.options import RESUME_MUTABLE, Options, Parser, add_common, add_virtual_ranks, as_json, resume_invariants


def parse(*arguments: str, resume_mutable: Sequence[str] = ()) -> Options:
    parser = Parser(prog="toy")
    add_common(
        parser,
        epochs=3,
        global_batch_size=64,
        lr="0.1",
        datasets=("mnist-5k", "mnist"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=resume_mutable,
    )
    return parser.parse(arguments)


# --- mistakes ----------------------------------------------------------------------------------------------------

WHOLE = {
    "--epochs": 0,
    "--max-steps": 0,
    "--global-batch-size": 1,
    "--seed": 0,
    "--checkpoint-every": 0,
    "--keep-checkpoints": 1,
    "--log-every": 1,
    "--max-restarts": 0,
}
REAL = ("--lr", "--timeout", "--grace")
NOT_WHOLE = ("", "x", "1.5", "1e3", "-1", "-0.5", "0x10", "nan", "inf", "None", "1,000", str(2**63), "9" * 5000, "1\n2")
NOT_REAL = ("", "x", "0", "-0.0", "-1", "nan", "-nan", "inf", "-inf", "1e400", "None", "0,1", "1\n2")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in WHOLE for value in NOT_WHOLE),
        *((option, str(least - 1)) for option, least in WHOLE.items()),
        *((option, str(2**31)) for option in WHOLE if option != "--seed"),
        *(("--lr", value) for value in ("1e38", "1e308")),
        *((option, value) for option in ("--timeout", "--grace") for value in ("1e7", "1e10", "1e300")),
        *((option, value) for option in REAL for value in NOT_REAL),
        *(("--dataset", value) for value in ("", "MNIST", "cifar10", "mnist,mnist-5k", "a\nb")),
        *(("--device", value) for value in ("", "tpu", "cuda:0", "gpu")),
        *(("--preemption-notice", value) for value in ("", "AWS", "aws,gcp", "file", "file:", "a\nb")),
    ],
)
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_bad_value_is_one_line_that_names_its_option(option: str, value: str, form: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*([option, value] if form == "two words" else [f"{option}={value}"]))
    text = str(caught.value)
    assert text.startswith(f"{option}: ")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("option", [*WHOLE, *REAL, "--dataset", "--data-dir", "--run-dir", "--init-from", "--device"])
def test_an_option_without_its_value_is_named(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: expected one argument"):
        parse(option)
    with pytest.raises(ConfigError, match=f"^{option}: expected one argument"):
        parse(option, "--quiet")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--epoch", "unknown argument --epoch: did you mean --epochs?"),
        ("--epoch=3", "unknown argument --epoch=3: did you mean --epochs?"),
        ("--batch-size", "unknown argument --batch-size: did you mean --global-batch-size?"),
        ("--no-resumes", "unknown argument --no-resumes: did you mean --no-resume?"),
        ("--zzzzzzzzzz", "unknown argument --zzzzzzzzzz: see --help"),
        ("4", "unknown argument 4: see --help"),
        ("-q", "unknown argument -q: see --help"),
    ],
)
def test_an_unknown_argument_is_named_with_a_guess(argument: str, message: str) -> None:
    """Abbreviations are unknown too, because a new option must not change the meaning of an old command."""
    with pytest.raises(ConfigError) as caught:
        parse(argument)
    assert str(caught.value) == message


@pytest.mark.parametrize("argument", ["--quiet=1", "--no-resume=1", "--resume=no"])
def test_a_flag_takes_no_value(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"resume|quiet"):
        parse(argument)


# --- values ------------------------------------------------------------------------------------------------------


def test_the_common_options_have_these_defaults() -> None:
    assert vars(parse()) == {
        "epochs": 3,
        "max_steps": None,
        "global_batch_size": 64,
        "lr": None,
        "seed": 1,
        "init_from": None,
        "dataset": None,
        "requested_dataset": None,
        "data_dir": Path("data"),
        "run_dir": None,
        "resume": True,
        "checkpoint_every": 500,
        "keep_checkpoints": 3,
        "log_every": 10,
        "evaluate_every": 0,
        "evaluate_only": False,
        "keep_best": False,
        "device": "auto",
        "max_restarts": 3,
        "timeout": 300.0,
        "grace": 30.0,
        "preemption_notice": None,
        "straggler": 1.5,
        "track": None,
        "quiet": False,
    }


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        *(([option, str(least)], option[2:].replace("-", "_"), least) for option, least in WHOLE.items()),
        *(([option, str(2**31 - 1)], option[2:].replace("-", "_"), 2**31 - 1) for option in WHOLE),
        (["--seed", str(2**63 - 1)], "seed", 2**63 - 1),
        (["--lr=9.9e37"], "lr", 9.9e37),
        (["--timeout=9999999"], "timeout", 9_999_999.0),
        (["--lr", "1e-300"], "lr", 1e-300),
        (["--lr=.5"], "lr", 0.5),
        (["--timeout", "0.5"], "timeout", 0.5),
        (["--straggler", "0"], "straggler", 0.0),
        (["--resume"], "resume", True),
        (["--no-resume"], "resume", False),
        (["--no-resume", "--resume"], "resume", True),  # the launch script appends --resume for its ranks
        (["--quiet"], "quiet", True),
        (["--run-dir", "a folder"], "run_dir", Path("a folder")),
        (["--data-dir=/data"], "data_dir", Path("/data")),
        (["--epochs", "1", "--epochs", "2"], "epochs", 2),
        (["--preemption-notice=auto"], "preemption_notice", "auto"),
        (["--preemption-notice", "file:a b"], "preemption_notice", "file:a b"),
    ],
)
def test_a_good_value_is_taken(arguments: list[str], name: str, value: Any) -> None:
    found = getattr(parse(*arguments), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--keep-best"], True),
        (["--keep-best", "--quiet"], True),
        (["--keep-best", "test_loss"], "min:test_loss"),
        (["--keep-best=test_accuracy"], "max:test_accuracy"),
        (["--keep-best=min:test_accuracy"], "min:test_accuracy"),
    ],
)
def test_keep_best_takes_a_metric_and_its_direction(arguments: list[str], expected: object) -> None:
    assert parse(*arguments).keep_best == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("max:f1", "'max:f1' names no metric: choose one of test_accuracy, test_loss"),
        ("", "'' names no metric: choose one of test_accuracy, test_loss"),
        ("top:test_loss", "'top:test_loss' has no direction: use min:test_loss or max:test_loss"),
    ],
)
def test_keep_best_refuses_an_unknown_metric_before_training(value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"--keep-best={value}")
    assert str(caught.value) == f"--keep-best: {problem} (see --help)"


@pytest.mark.parametrize(
    ("text", "good"), [("0", True), ("0.999", True), ("1", False), ("1.5", False), ("-0.1", False), ("nan", False)]
)
def test_a_bounded_number_takes_its_minimum_and_refuses_its_limit(text: str, good: bool) -> None:
    parser = Parser()
    parser.add_argument("--dropout", type=options.bounded_float(0.0, below=1.0))
    if good:
        assert parser.parse(["--dropout", text]).dropout == float(text)
        return
    with pytest.raises(ConfigError, match=r"^--dropout: .* at least 0 and less than 1"):
        parser.parse(["--dropout", text])


# --- what a resume must repeat -----------------------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "epochs": 9,
    "max_steps": 9,
    "global_batch_size": 9,
    "lr": 9.0,
    "seed": 9,
    "init_from": Path("x"),
    "dataset": "mnist",
    "requested_dataset": "mnist",
    "data_dir": Path("x"),
    "run_dir": Path("x"),
    "resume": False,
    "checkpoint_every": 9,
    "keep_checkpoints": 9,
    "log_every": 9,
    "evaluate_every": 9,
    "evaluate_only": True,
    "keep_best": True,
    "device": "cpu",
    "max_restarts": 9,
    "timeout": 9.0,
    "grace": 9.0,
    "preemption_notice": "aws",
    "straggler": 9.0,
    "track": "wandb",
    "quiet": True,
}


@pytest.mark.parametrize("name", sorted(vars(parse())))
def test_an_option_counts_unless_it_may_change(name: str) -> None:
    given = parse("--dataset=mnist-5k", "--lr=0.1")
    before = resume_invariants(given)
    setattr(given, name, CHANGED[name])
    may_change = name not in ("global_batch_size", "lr", "seed", "dataset")
    assert (resume_invariants(given) == before) == may_change
    assert (name in RESUME_MUTABLE) == may_change


def test_virtual_ranks_take_one_thread_and_must_not_change() -> None:
    """A checkpoint omits --virtual-ranks=0, because checkpoints of earlier versions lack this option."""
    parser = Parser()
    add_common(parser, epochs=1, global_batch_size=1, lr="", datasets=("mnist",), devices=("auto",))
    add_virtual_ranks(parser)
    off = parser.parse(["--virtual-ranks=0"])
    on = parser.parse(["--virtual-ranks=8"])
    assert resume_invariants(off) == resume_invariants(parser.parse(["--threads=3"]))
    assert (off.virtual_ranks, off.threads, on.virtual_ranks, on.threads) == (None, None, 8, 1)
    assert parser.parse(["--virtual-ranks=8", "--threads=3"]).threads == 3
    assert resume_invariants(on) == {**resume_invariants(off), "virtual_ranks": 8}


def test_an_app_refuses_virtual_ranks_with_its_reason() -> None:
    parser = Parser()
    add_virtual_ranks(parser, "it has no batches")
    with pytest.raises(ConfigError, match="--virtual-ranks: not available, because it has no batches: leave it out"):
        parser.parse(["--virtual-ranks=2"])


def test_an_apps_own_option_counts_unless_the_app_says_otherwise() -> None:
    given = parse("--lr=0.1", resume_mutable=["logger"])
    before = resume_invariants(given)
    given.momentum = 0.9
    given.logger = "csv"
    assert resume_invariants(given) == {**before, "momentum": 0.9}


def test_what_the_parser_knows_stands_beside_the_options() -> None:
    given = parse(resume_mutable=["logger"])
    assert (given.default_dataset, given.resume_mutable) == ("mnist-5k", ["logger"])
    for found in (vars(given), resume_invariants(given), as_json(given)):
        assert not {"default_dataset", "resume_mutable", "resume_pinned", "resolve_dataset"} & found.keys()


def test_options_become_json_and_come_back_the_same() -> None:
    given = parse("--lr=0.1", "--run-dir=runs/x", "--max-steps=7", "--init-from=m.safetensors")
    for found in (resume_invariants(given), as_json(given)):
        assert json.loads(json.dumps(found)) == found
        assert list(found) == sorted(found)
    assert as_json(given).keys() == vars(given).keys()
    assert as_json(given)["run_dir"] == "runs/x"
    assert as_json(given)["init_from"] == "m.safetensors"


def test_a_schedule_makes_a_resume_keep_its_horizon() -> None:
    options = parse("--epochs=5")
    assert "epochs" not in resume_invariants(options)
    options.resume_pinned = ("epochs",)
    assert resume_invariants(options)["epochs"] == 5
    assert "resume_pinned" not in as_json(options)


def test_the_help_ends_with_the_options_that_a_resume_may_change() -> None:
    parser = Parser(prog="toy")
    settings: dict[str, Any] = {"lr": "1", "datasets": ("mnist",), "devices": ("auto",)}
    add_common(parser, epochs=1, global_batch_size=1, resume_mutable=("workers",), **settings)
    parser.add_argument("--workers")
    parser.add_argument("--width")
    last = " ".join(parser.format_help().partition("A resume may change ")[2].split())
    names = last.removesuffix(". It must repeat all other options.").split(", ")
    assert {"--epochs", "--data-dir", "--workers"} <= {*names}
    assert not {"--lr", "--seed", "--width", "--requested-dataset"} & {*names}


# --- an option as a field ----------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

    def __str__(self) -> str:
        return self.value


@dataclass
class OwnOptions(options.CommonOptions):
    """Options of an app, with another default of a common option and one new option of each kind."""

    epochs: int = 7
    dataset: str = options.dataset_option("mnist")
    size: tuple[int, int] = options.option((2, 3), "rows and columns", nargs=2, type=int, group=options.MODEL)
    color: Color = options.option(Color.RED, "color", type=Color, choices=list(Color))
    weights: Path | None = options.option(None, "file of weights", type=Path, may_change=True)
    shuffle: bool = options.option(False, "shuffle the samples")
    dtype: str = "float32"  # a constant of the app


def parse_own(*arguments: str) -> OwnOptions:
    parser = options.make_parser(OwnOptions, "Train.", prog="toy", usage="toy [options]")
    return options.parse_as(OwnOptions, parser, arguments)


def test_a_field_is_an_option_with_its_default_its_type_and_its_group() -> None:
    own = parse_own()
    assert (own.epochs, own.size, own.color, own.weights, own.shuffle) == (7, (2, 3), Color.RED, None, False)
    given = parse_own("--epochs=9", "--size", "4", "5", "--color=blue", "--weights=w", "--shuffle")
    assert (given.epochs, list(given.size), given.color) == (9, [4, 5], Color.BLUE)
    assert (given.weights, given.shuffle, given.dtype) == (Path("w"), True, "float32")
    text = options.make_parser(OwnOptions, "Train.", prog="toy", usage="toy [options]").format_help()
    assert "rows and columns (default: (2, 3))" in text
    assert "passes over the training set (default: 7)" in text
    assert text.index("Model:") < text.index("--size")
    with pytest.raises(ConfigError, match="unknown argument --dtype"):
        parse_own("--dtype=float64")


def test_a_resume_must_repeat_the_fields_that_do_not_say_otherwise() -> None:
    own = resume_invariants(parse_own("--weights=w"))
    assert {"size", "color", "shuffle", "dtype"} <= own.keys()
    assert not {"weights", "epochs", "device"} & own.keys()
    assert (own["size"], own["color"]) == ([2, 3], "red")


def test_an_option_that_an_app_lacks_has_a_neutral_value_and_is_not_recorded() -> None:
    own = parse_own()
    assert (own.virtual_ranks, own.threads, own.share_gpu, own.log_format) == (None, None, False, "plain")
    assert not {"virtual_ranks", "threads", "share_gpu", "log_format"} & as_json(own).keys()


@dataclass
class TokenOptions(options.CommonOptions):
    """Options of an app without ``--global-batch-size``."""

    dataset: str = options.dataset_option("text")
    global_batch_size: int = options.absent_option(0)


def test_an_absent_common_option_is_a_constant_that_no_checkpoint_has() -> None:
    parser = options.make_parser(TokenOptions, "Train.")
    parsed = options.parse_as(TokenOptions, parser, [])
    assert parsed.global_batch_size == 0
    assert "global_batch_size" not in as_json(parsed)
    assert "--global-batch-size" not in parser.format_help()
    with pytest.raises(ConfigError, match="unknown argument --global-batch-size"):
        options.parse_as(TokenOptions, parser, ["--global-batch-size=8"])
