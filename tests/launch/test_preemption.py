"""Test --preemption-notice: the protocols of cloud services against a local server, the thread, and wrong values."""

from __future__ import annotations

import functools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from samestep import ConfigError
from samestep.options import Options
from samestep_launch import app, preemption
from samestep_launch.preemption import Notice, Service, Watcher, ask_aws, ask_azure, ask_gcp
from scratch_project import SLEEPER, ScratchProject, end_of, wait_for

Answers = dict[str, Any]  # "METHOD path": a text, or a status and a text, or a function of the headers
TOKEN = "AQAEAL3vd7rNSQ=="
ACTION = {"action": "terminate", "time": "2026-11-28T09:22:00Z"}
AZURE_EVENTS = f"GET {preemption.AZURE_EVENTS}"
AZURE_NAME = f"GET {preemption.AZURE_NAME}"


class Handler(BaseHTTPRequestHandler):
    answers: Answers

    def do_GET(self) -> None:
        answer = self.answers.get(f"{self.command} {self.path}", (404, "not found"))
        if callable(answer):
            answer = answer(self.headers)
        status, text = (200, answer) if isinstance(answer, str) else answer
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """Yield a function that starts a metadata service with given answers, and returns the service's address."""
    servers = []

    def start(answers: Answers) -> str:
        handler = type("Answering", (Handler,), {"answers": answers})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def token(headers: Mapping[str, str]) -> tuple[int, str]:
    """Return IMDSv2's response to a token request: a token if the request has a lifetime."""
    has_lifetime = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
    return (200, TOKEN) if has_lifetime else (400, "Missing or Invalid Parameters")


def aws(action: tuple[int, str]) -> Answers:
    def answer(headers: Mapping[str, str]) -> tuple[int, str]:
        return action if headers.get("X-aws-ec2-metadata-token") == TOKEN else (401, "Unauthorized")

    return {"PUT /latest/api/token": token, "GET /latest/meta-data/spot/instance-action": answer}


def gcp(text: str) -> Answers:
    def answer(headers: Mapping[str, str]) -> tuple[int, str]:
        return (200, text) if headers.get("Metadata-Flavor") == "Google" else (403, "Missing Metadata-Flavor")

    return {"GET /computeMetadata/v1/instance/preempted": answer}


def azure(*events: dict[str, Any], name: str = "worker-1") -> Answers:
    def guarded(text: str, headers: Mapping[str, str]) -> tuple[int, str]:
        return (200, text) if headers.get("Metadata") == "true" else (400, "Bad request")

    content = json.dumps({"DocumentIncarnation": 3, "Events": events})
    return {AZURE_EVENTS: functools.partial(guarded, content), AZURE_NAME: functools.partial(guarded, name)}


def event(kind: str, *machines: str) -> dict[str, Any]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(machines),
        "EventStatus": "Scheduled",
        "NotBefore": "Sat, 28 Nov 2026 09:22:30 GMT",
        "Description": "",
        "EventSource": "Platform",
    }


NO_NOTICE = {
    "aws": (ask_aws, aws((404, "not found"))),
    "gcp": (ask_gcp, gcp("FALSE")),
    "azure": (ask_azure, azure()),
    "azure, another machine": (ask_azure, azure(event("Preempt", "worker-2"), event("Terminate", "worker-3"))),
    "azure, a pause": (ask_azure, azure(event("Freeze", "worker-1"), event("Reboot", "worker-1"))),
}


@pytest.mark.parametrize("case", NO_NOTICE)
def test_a_service_without_a_notice_gives_none(serve: Callable[[Answers], str], case: str) -> None:
    ask, answers = NO_NOTICE[case]
    assert ask(Service(serve(answers))) is None


NOTICES = {
    "aws": (ask_aws, aws((200, json.dumps(ACTION))), Notice("AWS will terminate this machine", ACTION["time"])),
    "gcp": (ask_gcp, gcp("TRUE"), Notice("Google Cloud preempts this machine")),
    "azure": (
        ask_azure,
        azure(event("Freeze", "worker-1"), event("Preempt", "worker-0", "worker-1")),
        Notice("Azure's event Preempt", "Sat, 28 Nov 2026 09:22:30 GMT"),
    ),
}


@pytest.mark.parametrize("case", NOTICES)
def test_a_notice_has_its_action_and_its_deadline(serve: Callable[[Answers], str], case: str) -> None:
    ask, answers, expected = NOTICES[case]
    assert ask(Service(serve(answers))) == expected


WRONG = {
    "aws, no token": (ask_aws, {}),
    "aws, a token of two lines": (ask_aws, {"PUT /latest/api/token": "a\nb"}),
    "aws, a page": (ask_aws, aws((200, "<html>"))),
    "aws, no action": (ask_aws, aws((200, "{}"))),
    "aws, a number": (ask_aws, aws((200, json.dumps({**ACTION, "time": 3})))),
    "aws, an error": (ask_aws, aws((503, ""))),
    "aws, a redirection": (ask_aws, aws((302, ""))),
    "gcp, another word": (ask_gcp, gcp("true\x1b[2J")),
    "gcp, missing": (ask_gcp, {}),
    "azure, a list": (ask_azure, {AZURE_EVENTS: "[]"}),
    "azure, no events": (ask_azure, {AZURE_EVENTS: "{}"}),
    "azure, nested": (ask_azure, {AZURE_EVENTS: "[" * 10**5}),
    "azure, no event": (ask_azure, {AZURE_EVENTS: '{"Events": [3]}'}),
    "azure, no resources": (ask_azure, {AZURE_EVENTS: '{"Events": [{"EventType": "Preempt", "NotBefore": ""}]}'}),
    "azure, no name": (ask_azure, {**azure(event("Preempt", "worker-1")), AZURE_NAME: (500, "")}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_one_warning_and_no_notice(
    serve: Callable[[Answers], str], capfd: pytest.CaptureFixture[str], case: str
) -> None:
    ask, answers = WRONG[case]
    acted: list[Notice] = []
    watch_for(0.1, functools.partial(ask, Service(serve(answers))), acted.append)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: --preemption-notice test: http://there: a wrong answer: ")
    assert line.endswith(": training continues, and looks again every 0.01 s")
    assert line.isprintable()
    assert not acted


def watch_for(seconds: float, ask: preemption.Ask, act: Callable[[Notice], None]) -> None:
    """Run a watcher in a thread for some seconds."""
    watcher = Watcher("test", ask, act, place="http://there: ", pause=0.01)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    time.sleep(seconds)
    watcher.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_silence_is_one_warning_after_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    acted: list[Notice] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service = Service(f"http://127.0.0.1:{silent.getsockname()[1]}")
        watch_for(0.1, functools.partial(ask_gcp, service), acted.append)
    assert not acted
    (line,) = capfd.readouterr().err.splitlines()
    assert "no answer within 1 s" in line or "timed out" in line


def test_a_service_that_refuses_connections_is_one_warning(capfd: pytest.CaptureFixture[str]) -> None:
    acted: list[Notice] = []
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    watch_for(0.1, functools.partial(ask_aws, Service(f"http://127.0.0.1:{port}")), acted.append)
    assert not acted
    (line,) = capfd.readouterr().err.splitlines()
    assert "Connection refused" in line


def test_a_notice_after_wrong_answers_is_acted_on_once() -> None:
    looks = []
    acted: list[Notice] = []

    def ask() -> Notice | None:
        looks.append(1)
        if len(looks) < 3:
            raise ValueError("not yet")
        return Notice("now")

    watch_for(0.2, ask, acted.append)
    assert acted == [Notice("now")]
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("strings", "provider"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"sys_vendor": "Xen\n", "bios_vendor": "Amazon EC2\n"}, "aws"),
        ({"product_name": "Google Compute Engine\n", "sys_vendor": "Google\n"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n", "sys_vendor": "Microsoft Corporation\n"}, "azure"),
        ({"chassis_asset_tag": "None\n", "sys_vendor": "Microsoft Corporation\n"}, None),
        ({"sys_vendor": "QEMU\n"}, None),
        ({}, None),
    ],
)
def test_auto_takes_the_provider_that_the_machine_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], strings: dict[str, str], provider: str | None
) -> None:
    for name, text in strings.items():
        (tmp_path / name).write_text(text)
    assert preemption.provider_of(tmp_path) == provider
    ask = preemption.find_source("auto", Service("http://127.0.0.1:9"), tmp_path)
    assert (ask is None) == (provider is None)
    assert ("auto: the DMI strings of this machine name neither" in capfd.readouterr().err) == (provider is None)


@pytest.mark.parametrize("url", ["ftp://a", "a", "http://", "http://a/b", "http://a:b", "http://u@a", "http://a:0\n"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"SAMESTEP_METADATA_URL=.* is no address: write http://HOST"):
        preemption.metadata_url({preemption.URL_VARIABLE: url})
    assert preemption.metadata_url({preemption.URL_VARIABLE: "http://[fd00:ec2::254]:80"}).endswith(":80")
    assert preemption.metadata_url({}) == preemption.URL


def test_a_file_that_cannot_be_a_notice_is_refused(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path, "is not a file: name a file"),
        (tmp_path / "none" / "notice", "its folder is missing"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\nb", "control character"),
    ):
        options = Options()
        options.preemption_notice = f"file:{path}"
        with pytest.raises(ConfigError, match=problem):
            app.check_notice(options)


# --- jobs of the scratch project: its launcher is a program of the standard library --------------------------------


@pytest.mark.parametrize("value", ["gpc", "file:", "file", "AWS", "auto,aws", "file:/"])
def test_a_wrong_source_is_one_line_before_anything_starts(project: ScratchProject, value: str) -> None:
    done = project.run("", "2", f"--preemption-notice={value}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --preemption-notice")
    assert not project.run_dir.exists()


def test_a_notice_by_a_file_ends_the_job_as_term_does(project: ScratchProject) -> None:
    notice = project.work / "notice"
    process = project.start(f"heartbeat(1)\nrank({SLEEPER!r}).wait()", "1", f"--preemption-notice=file:{notice}")
    wait_for(lambda: (project.run_dir / "log" / "alive-0").exists())
    notice.touch()
    done = end_of(process)
    assert done.returncode == 128 + signal.SIGTERM
    lines = done.stderr.splitlines()
    assert f"notice of preemption: {notice} exists" in lines
    assert any(line.startswith("stopping (SIGTERM): ") for line in lines)
    recorded = [json.loads(line) for line in (project.run_dir / "log" / "events.jsonl").read_text().splitlines()]
    assert recorded[0]["text"] == f"notice of preemption: {notice} exists"


def test_a_notice_stops_the_job_although_term_is_ignored(project: ScratchProject) -> None:
    """A batch script's ``trap '' TERM`` also makes the launch script ignore TERM."""
    notice = project.work / "notice"
    code = f"heartbeat(1)\nrank({SLEEPER!r}).wait()"
    process = project.start(code, "1", f"--preemption-notice=file:{notice}", "--grace=2", ignored=[signal.SIGTERM])
    wait_for(lambda: (project.run_dir / "log" / "alive-0").exists())
    process.send_signal(signal.SIGTERM)
    notice.touch()
    done = end_of(process)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.startswith(f"notice of preemption: {notice} exists\nstopping (SIGTERM)")
