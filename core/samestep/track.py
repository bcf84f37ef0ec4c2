"""Run `samestep.observe.track` as ``python -m samestep.track``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("samestep.observe.track", run_name="__main__")
