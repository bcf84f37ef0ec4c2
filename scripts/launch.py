"""Start an app by its launcher. scripts/launch.sh runs this program.

The command is ``python scripts/launch.py <app> <template of the launcher> -- N [options]``.
"""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C during the imports needs no traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

import importlib.util
from pathlib import Path

root = Path(__file__).resolve().parents[1]
os.environ.pop("PYTHONSAFEPATH", None)  # apps import files from their own folder
# A project that new_app.py made has a wheel instead of the four folders below. The first stage imports from the wheel.
# The second stage needs an environment in which the wheel is installed, because samestep reads data files.
wheel = next(root.glob("vendor/samestep-*.whl"), None)
here = 0 if getattr(sys.flags, "safe_path", False) else 1  # 1 if sys.path begins with this folder
sys.path[:here] = [str(root / folder) for folder in ("core", "launch", "observe", "check")]
if wheel and sys.argv[1:2] != ["--second-stage"]:
    sys.path[:1] = [str(wheel)]
elif wheel:
    package = importlib.util.find_spec("samestep")
    if package is None:
        install = f"{sys.executable} -m pip install {wheel}"
        print(f"error: {sys.executable} lacks samestep: {install}; or unset PYTHON to have one made", file=sys.stderr)
        sys.exit(2)
    if not any(Path(folder, "rundir.py").is_file() for folder in package.submodule_search_locations or ()):
        print(f"error: {package.origin} hides the package samestep: take it off PYTHONPATH", file=sys.stderr)
        sys.exit(2)

from samestep_launch.app import leave, main  # noqa: E402

leave(main(root, sys.argv[1:]))
