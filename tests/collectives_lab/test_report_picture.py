"""Test the picture of `samestep_observe.report --png`. Only this app's environment has matplotlib."""

from __future__ import annotations

import struct
from pathlib import Path

from samestep.metrics import Metrics
from samestep_observe import report


def test_plots_are_drawn_by_matplotlib(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("$one_", "_two")]  # matplotlib would read these names as formulas
    for run_dir in folders:
        (run_dir / "log").mkdir(parents=True)
        metrics = Metrics(run_dir, {"app": "toy", "options": {}, "world": {}}, None)
        for step in range(1, 20):
            metrics.write(
                step=step, loss=1 / step, samples_per_second=100.0, **({} if step % 5 else {"test_loss": 0.5})
            )
    picture = tmp_path / "r.png"
    assert report.main([*map(str, folders), "-o", str(tmp_path / "r.html"), "--png", str(picture)]) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) > (1000, 500)
