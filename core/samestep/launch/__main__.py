"""``python -m samestep.launch``: the command ``samestep``."""

import sys

from samestep.launch.cli import main

sys.exit(main())
