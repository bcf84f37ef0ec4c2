"""Run `samestep.observe.watch` as ``python -m samestep.watch``."""

import runpy

runpy.run_module("samestep.observe.watch", run_name=__name__)  # only as a program does it do anything
