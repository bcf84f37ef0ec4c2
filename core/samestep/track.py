"""Run `samestep.observe.track` as ``python -m samestep.track``."""

import runpy

runpy.run_module("samestep.observe.track", run_name=__name__)  # only as a program does it do anything
