"""Run `samestep.observe.hang_report` as ``python -m samestep.autopsy``."""

import runpy

runpy.run_module("samestep.observe.hang_report", run_name=__name__)  # only as a program does it do anything
