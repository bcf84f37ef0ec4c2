"""The entry of every launch script: ``python scripts/launcher <app> <template> -- N [options]``."""

import importlib.util
import os
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(root / "scripts"), str(root / "core")]  # this package and core, in place of this folder
# A project that is a copy of one app has core's wheel. Python imports from it what the first stage needs; the second
# runs where it is installed, as its data are files.
wheel = next(root.glob("vendor/samestep-*.whl"), None)
if wheel and not os.environ.get("SAMESTEP_SECOND_STAGE"):
    sys.path.insert(1, str(wheel))
elif wheel and importlib.util.find_spec("samestep") is None:
    install = f"{sys.executable} -m pip install {wheel}"
    print(f"error: {sys.executable} lacks samestep: {install}; or unset PYTHON to have one made", file=sys.stderr)
    sys.exit(2)

from launcher.launch import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
