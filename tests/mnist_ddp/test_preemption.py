"""Test a notice of preemption in a real job: its ranks save a step and end within --grace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import Harness, last_step
from samestep import checkpoint

GRACE = 25  # seconds; Google Cloud allows 30
OPTIONS = ["--dataset=mnist-5k", "--epochs=100000", "--log-every=1", f"--grace={GRACE}"]


class Preemptible(BaseHTTPRequestHandler):
    """A fake of Google Cloud's metadata server."""

    notice = threading.Event()

    def do_GET(self) -> None:
        is_valid = self.headers["Metadata-Flavor"] == "Google" and self.path.endswith("/v1/instance/preempted")
        self.send_response(200 if is_valid else 403)
        self.end_headers()
        self.wfile.write(b"TRUE" if self.notice.is_set() else b"FALSE")

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def metadata_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Preemptible) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("source", ["file", "gcp"])
def test_a_notice_saves_a_step_and_ends_the_job_within_its_grace(
    harness: Harness, metadata_url: str, source: str
) -> None:
    path = harness.folder / "notice"
    give: dict[str, Callable[[], None]] = {"file": path.touch, "gcp": Preemptible.notice.set}
    text = {"file": f"{path} exists", "gcp": "Google Cloud preempts this machine"}
    value = f"file:{path}" if source == "file" else source
    options = [*OPTIONS, f"--preemption-notice={value}"]
    job = harness.start(2, *options, SAMESTEP_METADATA_URL=metadata_url, http_proxy="http://127.0.0.1:9")
    job.wait_for_step(5)
    give[source]()
    begun = time.monotonic()
    outcome = job.finish()
    assert time.monotonic() - begun < GRACE
    assert outcome.code == 143, outcome
    assert f"notice of preemption: {text[source]}" in outcome.stderr.splitlines()
    assert "which is saved" in outcome.stdout, outcome
    newest = checkpoint.newest(job.run_dir, pytest.fail)
    assert newest is not None
    assert newest.step == last_step(Path(job.run_dir))
