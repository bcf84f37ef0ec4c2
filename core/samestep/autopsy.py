"""Run `samestep.observe.hang_report` as ``python -m samestep.autopsy``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("samestep.observe.hang_report", run_name="__main__")
