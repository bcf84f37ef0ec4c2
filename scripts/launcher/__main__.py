"""The entry of every launch script: ``python scripts/launcher <app> <template> -- N [options]``."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(root / "scripts"), str(root / "core")]  # this package and core, in place of this folder

from launcher.launch import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
