"""Run `samestep.observe.report` as ``python -m samestep.report``."""

import runpy

runpy.run_module("samestep.observe.report", run_name=__name__)  # only as a program does it do anything
