"""Run `samestep.observe.report` as ``python -m samestep.report``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("samestep.observe.report", run_name="__main__")
