"""The options every app shares: each mistake is one line that names its option, told before anything is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from samestep import UserError, options
from samestep.options import MAY_CHANGE_AT_RESUME, Parser, add_common, arithmetic, as_json

ROOT = Path(__file__).resolve().parents[2]
CORE = str(Path(options.__file__).parents[1])
APPS = sorted(path.parent.name for path in ROOT.glob("apps/*/options.py"))


def parse(*arguments: str) -> Namespace:
    parser = Parser(prog="toy")
    add_common(
        parser,
        epochs=3,
        global_batch_size=64,
        lr="0.1",
        datasets=("mnist-5k", "mnist"),
        devices=("auto", "cpu", "cuda"),
    )
    return parser.parse(arguments)


def app_options(app: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{app}_options", ROOT / "apps" / app / "options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
REAL = ("--lr", "--timeout")
NOT_WHOLE = ("", "x", "1.5", "1e3", "-1", "-0.5", "0x10", "nan", "inf", "None", "1,000", str(2**63), "9" * 5000, "1\n2")
NOT_REAL = ("", "x", "0", "-0.0", "-1", "nan", "-nan", "inf", "-inf", "1e400", "None", "0,1", "1\n2")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in WHOLE for value in NOT_WHOLE),
        *((option, str(least - 1)) for option, least in WHOLE.items()),
        *((option, value) for option in REAL for value in NOT_REAL),
        *(("--dataset", value) for value in ("", "MNIST", "cifar10", "mnist,mnist-5k", "a\nb")),
        *(("--device", value) for value in ("", "tpu", "cuda:0", "gpu")),
    ],
)
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_bad_value_is_one_line_that_names_its_option(option: str, value: str, form: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*([option, value] if form == "two words" else [f"{option}={value}"]))
    text = str(caught.value)
    assert text.startswith(f"{option}: ")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("option", [*WHOLE, *REAL, "--dataset", "--data-dir", "--run-dir", "--init-from", "--device"])
def test_an_option_without_its_value_is_named(option: str) -> None:
    with pytest.raises(UserError, match=f"^{option}: expected one argument"):
        parse(option)
    with pytest.raises(UserError, match=f"^{option}: expected one argument"):
        parse(option, "--quiet")


@pytest.mark.parametrize(
    ("argument", "said"),
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
def test_an_unknown_argument_is_named_with_a_guess(argument: str, said: str) -> None:
    """Also an abbreviation, which argparse would accept: a new option must not change what an old call means."""
    with pytest.raises(UserError) as caught:
        parse(argument)
    assert str(caught.value) == said


@pytest.mark.parametrize("argument", ["--quiet=1", "--no-resume=1", "--resume=no"])
def test_a_flag_takes_no_value(argument: str) -> None:
    with pytest.raises(UserError, match=r"resume|quiet"):
        parse(argument)


# --- values ------------------------------------------------------------------------------------------------------


def test_the_defaults() -> None:
    assert vars(parse()) == {
        "epochs": 3,
        "max_steps": None,
        "global_batch_size": 64,
        "lr": None,
        "seed": 1,
        "init_from": None,
        "dataset": None,
        "requested_dataset": None,
        "default_dataset": "mnist-5k",
        "may_change_at_resume": [],
        "data_dir": Path("data"),
        "run_dir": None,
        "resume": True,
        "checkpoint_every": 500,
        "keep_checkpoints": 3,
        "log_every": 10,
        "device": "auto",
        "max_restarts": 3,
        "timeout": 300.0,
        "quiet": False,
    }


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        *(([option, str(least)], option[2:].replace("-", "_"), least) for option, least in WHOLE.items()),
        *(([option, str(2**63 - 1)], option[2:].replace("-", "_"), 2**63 - 1) for option in WHOLE),
        (["--lr", "1e-300"], "lr", 1e-300),
        (["--lr=.5"], "lr", 0.5),
        (["--timeout", "0.5"], "timeout", 0.5),
        (["--resume"], "resume", True),
        (["--no-resume"], "resume", False),
        (["--no-resume", "--resume"], "resume", True),  # the launch script appends --resume for its ranks
        (["--quiet"], "quiet", True),
        (["--run-dir", "a folder"], "run_dir", Path("a folder")),
        (["--data-dir=/data"], "data_dir", Path("/data")),
        (["--epochs", "1", "--epochs", "2"], "epochs", 2),
    ],
)
def test_a_good_value_is_taken(arguments: list[str], name: str, value: Any) -> None:
    found = getattr(parse(*arguments), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "good"), [("0", True), ("0.999", True), ("1", False), ("1.5", False), ("-0.1", False), ("nan", False)]
)
def test_a_real_number_below_a_limit(text: str, good: bool) -> None:
    parser = Parser()
    parser.add_argument("--dropout", type=options.real(0.0, below=1.0))
    if good:
        assert parser.parse(["--dropout", text]).dropout == float(text)
        return
    with pytest.raises(UserError, match=r"^--dropout: .* at least 0 and less than 1"):
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
    "default_dataset": "mnist",
    "may_change_at_resume": ["momentum"],
    "data_dir": Path("x"),
    "run_dir": Path("x"),
    "resume": False,
    "checkpoint_every": 9,
    "keep_checkpoints": 9,
    "log_every": 9,
    "device": "cpu",
    "max_restarts": 9,
    "timeout": 9.0,
    "quiet": True,
}


@pytest.mark.parametrize("name", sorted(vars(parse())))
def test_an_option_counts_unless_it_may_change(name: str) -> None:
    given = parse("--dataset=mnist-5k", "--lr=0.1")
    before = arithmetic(given)
    setattr(given, name, CHANGED[name])
    may_change = name not in ("global_batch_size", "lr", "seed", "dataset")
    assert (arithmetic(given) == before) == may_change
    assert (name in MAY_CHANGE_AT_RESUME) == may_change


def test_an_apps_own_option_counts_unless_the_app_says_otherwise() -> None:
    given = Namespace(momentum=0.9, logger="csv", quiet=True, may_change_at_resume=["logger"])
    assert arithmetic(given) == {"momentum": 0.9}


def test_options_become_json_and_come_back_the_same() -> None:
    given = parse("--lr=0.1", "--run-dir=runs/x", "--max-steps=7", "--init-from=m.safetensors")
    for found in (arithmetic(given), as_json(given)):
        assert json.loads(json.dumps(found)) == found
        assert list(found) == sorted(found)
    assert as_json(given).keys() == vars(given).keys()
    assert as_json(given)["run_dir"] == "runs/x"
    assert as_json(given)["init_from"] == "m.safetensors"


# --- every app ---------------------------------------------------------------------------------------------------

TRAINING = [app for app in APPS if not hasattr(app_options(app), "COMMANDS")]  # the others measure


def test_commands_have_run_dir_and_nothing_of_a_training_that_resumes() -> None:
    for app in set(APPS) - set(TRAINING):
        module = app_options(app)
        for command in module.COMMANDS:
            parsed = module.parse([command, "--run-dir=runs/x"])
            assert parsed.run_dir == Path("runs/x")
            assert not hasattr(parsed, "resume")
            assert command in module.build_parser().help_for([command, "--help"])


@pytest.mark.parametrize("app", TRAINING)
def test_every_app_has_the_common_options(app: str) -> None:
    parsed = app_options(app).parse([])
    assert vars(parse()).keys() <= vars(parsed).keys()
    assert parsed.lr is not None  # what the app chooses is in the record and in the checkpoint
    json.dumps(arithmetic(parsed))


@pytest.mark.parametrize("app", TRAINING)
def test_every_app_explains_itself(app: str) -> None:
    text = app_options(app).build_parser(usage="the usage").format_help()
    assert "the usage" in text
    assert all(option in text for option in [*WHOLE, *REAL, "--no-resume", "--init-from", "--run-dir"])


@pytest.mark.parametrize("app", APPS)
def test_every_app_tells_a_mistake_as_user_error(app: str) -> None:
    for bad in (["--epochs=x"], ["--lr=0"], ["--no-such-option"], ["5"]):
        with pytest.raises(UserError):
            app_options(app).parse(bad)


# --- the system's Python -----------------------------------------------------------------------------------------

FIRST_STAGE = """
import importlib.util, runpy, sys
sys.path.insert(0, sys.argv[1])
missing = [name for name in ("numpy", "safetensors", "tqdm", "pytest", "pip") if importlib.util.find_spec(name) is None]
assert "numpy" in missing and "pytest" in missing, "third-party packages can be imported here, so nothing is shown"
import samestep.launch, samestep.options
for path in sys.argv[2:]:
    module = runpy.run_path(path)
    if "COMMANDS" in module:
        command = next(iter(module["COMMANDS"]))
        assert module["parse"]([command]).command == command
        continue
    parsed = module["parse"](["--epochs", "1", "--no-resume"])
    assert parsed.epochs == 1 and parsed.resume is False
own = [name for name in sys.modules if name.startswith("samestep")]
assert set(own) <= {"samestep", *(f"samestep.{name}" for name in ("launch", "options", "supervise", "venvs"))}, own
print("ok")
"""


def interpreters() -> list[str]:
    """This one, and a 3.9 where one works."""
    found = [sys.executable]
    oldest = shutil.which("python3.9")
    if oldest and subprocess.run([oldest, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
        found.append(oldest)
    return found


@pytest.mark.parametrize("python", interpreters())
def test_the_first_stage_needs_only_the_standard_library(python: str) -> None:
    apps = [str(ROOT / "apps" / app / "options.py") for app in APPS]
    done = subprocess.run(  # -I and -S: no PYTHONPATH, no site-packages
        [python, "-I", "-S", "-c", FIRST_STAGE, CORE, *apps], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    "path",
    [
        *(Path(CORE, "samestep", f"{name}.py") for name in ("__init__", "launch", "options", "supervise", "venvs")),
        *(ROOT / "apps" / app / "options.py" for app in APPS),
    ],
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_the_first_stage_is_written_in_the_language_of_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))
