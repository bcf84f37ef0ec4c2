"""Run `samestep.observe.watch` as ``python -m samestep.watch``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("samestep.observe.watch", run_name="__main__")
