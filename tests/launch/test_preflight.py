"""Test the preflight of several machines: first with threads that connect on loopback, then with launch scripts."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from processes import connect, free_port
from repository import REPOSITORY
from samestep import ConfigError, NonRetryableError
from samestep.job_info import JobInfo
from samestep_launch import preflight
from samestep_launch.preflight import NodeInfo, Rendezvous
from scratch_project import ScratchProject, end_of

NODE = NodeInfo(
    app="toy",
    machine=0,
    machines=2,
    ranks=2,
    options={"epochs": 3, "max_steps": None},
    files={"apps/toy/train.py": "ab", "core/samestep/run.py": "cd"},
    versions={"Python": "3.11", "torch": "2.13.0"},
    host="alpha",
)
HOSTS = ("alpha", "beta", "gamma")


def node(machine: int, machines: int = 2, **changes: Any) -> NodeInfo:
    return replace(NODE, machine=machine, machines=machines, host=HOSTS[machine], **changes)


def nothing(plan: Mapping[str, Any]) -> None:
    pass


def together(
    *machines: NodeInfo | tuple[NodeInfo, float],
    limit: float = 20.0,
    prepare: Callable[[Mapping[str, Any]], None] = nothing,
    **settings: Any,
) -> list[Rendezvous | Exception]:
    """Run `preflight` of all machines, each after its delay in seconds, and return their results or errors."""
    port = int(free_port())

    def one(info: NodeInfo, late: float) -> Rendezvous:
        time.sleep(late)
        return preflight.preflight(
            info, "127.0.0.1", port, limit, lambda: {"job": f"of {info.host}"}, prepare, **settings
        )

    with ThreadPoolExecutor(len(machines)) as pool:
        futures: list[Future[Rendezvous]] = [
            pool.submit(one, *(each if isinstance(each, tuple) else (each, 0.0))) for each in machines
        ]
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]


def test_all_know_the_same_when_they_start() -> None:
    prepared: list[Any] = []
    found = together((node(0, 3, ranks=1), 0.7), (node(1, 3), 0.0), (node(2, 3, ranks=4), 1.5), prepare=prepared.append)
    assert found == [Rendezvous((1, 2, 4), "127.0.0.1", "127.0.0.1", {"job": "of alpha"})] * 3
    assert prepared == [{"job": "of alpha"}] * 2  # machine 0 made the plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"app": "other"}, "the app is toy on machine 0 (alpha) and other on machine 1 (beta)"),
        ({"machines": 3}, "NNODES is 2 on machine 0 (alpha) and 3 on machine 1 (beta)"),
        (
            {"files": {**NODE.files, "apps/toy/train.py": "ff"}},
            "apps/toy/train.py differs between machine 0 (alpha) and machine 1 (beta): check out the same commit",
        ),
        ({"files": {}}, "apps/toy/train.py differs"),
        ({"versions": {"Python": "3.11", "torch": "2.12.1"}}, "torch is 2.13.0 on machine 0 (alpha) and 2.12.1 on"),
        ({"versions": {"Python": "3.11"}}, "torch is 2.13.0 on machine 0 (alpha) and missing on machine 1 (beta)"),
        ({"options": {"epochs": 4, "max_steps": None}}, "--epochs is 3 on machine 0 (alpha) and 4 on machine 1 (beta)"),
        ({"options": {"epochs": 3, "max_steps": 7}}, "--max-steps is null on machine 0 (alpha) and 7 on"),
    ],
)
def test_what_differs_between_machines_is_told_alike_on_both(changes: dict[str, Any], message: str) -> None:
    both = together(node(0), replace(node(1), **changes))
    assert [type(each) for each in both] == [ConfigError, ConfigError]
    assert str(both[0]) == str(both[1])
    assert str(both[0]).startswith(message)


def test_the_page_shows_the_lines_as_they_are() -> None:
    page = (REPOSITORY / "docs" / "scale-out.md").read_text()
    messages = re.findall(r"^\| `([^`]{20,})`", page, re.MULTILINE)
    files = {"apps/mnist_ddp/train.py": "ab"}
    first = replace(node(0), host="a", ranks=1, options={"epochs": 2}, files=files)
    other = replace(first, machine=1, host="b")
    for unlike in (
        replace(other, options={"epochs": 3}),
        replace(other, files={"apps/mnist_ddp/train.py": "cd"}),
        replace(other, versions={**NODE.versions, "torch": "2.12.1"}),
        replace(other, ranks=2),
    ):
        line = preflight.difference(first, unlike, equal_ranks=True)
        assert any(each in line for each in messages), line
    both = preflight.difference(replace(other, host="a"), other)
    assert any(each in both for each in messages), both


def test_another_number_of_ranks_is_a_matter_of_the_apps_launcher() -> None:
    one = node(0)
    other = node(1, ranks=3)
    assert preflight.difference(one, other) == ""
    assert "N is 2 on machine 0 (alpha) and 3 on machine 1 (beta)" in preflight.difference(one, other, equal_ranks=True)


def test_two_machines_of_one_number_are_both_named() -> None:
    found = together(node(0, 3), node(1, 3), replace(node(2, 3), machine=1))
    assert {str(each) for each in found} <= {
        f"{a} and {b} both have NODE_RANK=1: give each machine its own" for a, b in (("beta", "gamma"), HOSTS[:0:-1])
    }
    assert len({str(each) for each in found}) == 1


def test_a_machine_that_does_not_come_is_named_on_those_that_did() -> None:
    first, second = together(node(0, 3), node(1, 3), limit=1.0)
    assert isinstance(first, NonRetryableError)
    assert str(first).startswith("machine 2 of 3 did not come within 1 s: MASTER_ADDR=127.0.0.1 MASTER_PORT=")
    assert str(first).endswith(" is a loopback address, by which no other machine is reached")
    assert str(second) == str(first)


def test_a_machine_that_finds_nobody_says_where_it_looked(capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = together(node(1), limit=0.5)
    assert isinstance(found, NonRetryableError)
    assert str(found).startswith("machine 1 (beta) did not reach machine 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT=")
    assert "connection refused; that is a loopback address" in str(found)


def test_what_one_machine_lacks_ends_all_with_its_name() -> None:
    def prepare(plan: Mapping[str, Any]) -> None:
        raise ConfigError("cannot make /runs: Permission denied")

    both = together(node(0), node(1), prepare=prepare)
    assert [type(each) for each in both] == [ConfigError] * 2
    assert {str(each) for each in both} == {"machine 1 (beta): cannot make /runs: Permission denied"}


def test_a_machine_that_is_slow_to_prepare_is_named() -> None:
    first, _ = together(node(0), node(1), limit=1.0, prepare=lambda plan: time.sleep(2.5))
    assert str(first).startswith("machine 1 (beta) of 2 did not get ready within 1 s")


def test_who_waits_is_told_for_whom(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "WAIT_NOTICE_AFTER", 1.0)
    together(node(0, 3), node(1, 3), (node(2, 3), 2.0))
    assert "waiting for machine 2 of 3 at MASTER_ADDR=127.0.0.1" in capfd.readouterr().err
    together((node(0), 2.0), node(1))
    assert "waiting for machine 0 at MASTER_ADDR=127.0.0.1" in capfd.readouterr().err


def test_a_machine_that_is_lost_while_others_get_ready_is_named() -> None:
    """Only the closed connection shows the loss."""
    port = int(free_port())
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(preflight.preflight, node(0), "127.0.0.1", port, 20.0, dict, nothing)
        line = preflight.JsonConnection(connect(port, 5))
        assert line.introduce(asdict(node(1, nonce="one")), time.monotonic() + 10) == {"here": True}
        assert line.receive() == {"plan": {}}
        line.close()
        assert str(host.exception(10)) == "machine 1 (beta) was lost before the start: see its messages there"


def test_strangers_are_ignored_and_a_machine_may_come_again() -> None:
    port = int(free_port())
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(preflight.preflight, node(0, 3), "127.0.0.1", port, 20.0, dict, nothing)
        garbage = (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"protocol": 1}\n', b"\xff\xfe\n", b"{" * 10_000, b"")
        strangers = [connect(port, 5) for _ in garbage]
        for stranger, words in zip(strangers, garbage):
            stranger.sendall(words)
        strangers[0].close()
        once = preflight.JsonConnection(connect(port, 5))  # a machine connects, and dies
        assert once.introduce(asdict(node(1, 3, nonce="one")), time.monotonic() + 10) == {"here": True}
        once.close()
        again = pool.submit(preflight.preflight, node(1, 3), "127.0.0.1", port, 20.0, dict, nothing)
        met = preflight.preflight(node(2, 3), "127.0.0.1", port, 20.0, dict, nothing)
        assert [host.result(10), again.result(10)] == [met, met]
        for stranger in strangers:
            stranger.close()


def test_machines_that_come_at_different_times_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine 1 waited for machine 0 and met it, so the error of machine 1 must name machine 2."""
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.5)
    first, second = together((node(0, 3), 1.5), node(1, 3), limit=2.0)
    assert str(first).startswith("machine 2 of 3 did not come within 2 s")
    assert str(second) == str(first)


def test_what_takes_long_once_all_are_here_is_not_the_others_fault() -> None:
    port = int(free_port())

    def resolve() -> dict[str, str]:
        time.sleep(2.0)
        return {"job": "j"}

    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(preflight.preflight, node(0), "127.0.0.1", port, 1.0, resolve, nothing)
        assert preflight.preflight(node(1), "127.0.0.1", port, 1.0, dict, nothing) == host.result(30)


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        (ConfigError("cannot make /runs"), ConfigError, "machine 0 (alpha): cannot make /runs"),
        (OSError(28, "No space left on device"), ConfigError, "machine 0 (alpha): [Errno 28] No space left on device"),
        (ValueError("a bug"), NonRetryableError, "machine 0 (alpha): ValueError: a bug"),
    ],
)
def test_what_machine_0_cannot_resolve_is_told_with_its_name(problem: Exception, kind: type, message: str) -> None:
    port = int(free_port())

    def resolve() -> dict[str, str]:
        raise problem

    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(preflight.preflight, node(0), "127.0.0.1", port, 20.0, resolve, nothing)
        with pytest.raises(kind) as found:
            preflight.preflight(node(1), "127.0.0.1", port, 20.0, dict, nothing)
        assert str(found.value) == message
        assert host.exception(30) is not None


@pytest.mark.parametrize("name", ["no-such-machine.invalid", ".svc", "a..b", "x" * 70])
def test_a_name_that_does_not_resolve_is_said_so(name: str) -> None:
    with pytest.raises(NonRetryableError, match="the name does not resolve"):
        preflight.preflight(node(1), name, 29400, 0.3, dict, nothing)


def test_another_program_on_the_port_is_not_taken_for_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(NonRetryableError, match="the peer does not answer: it may be another program"):
            preflight.preflight(node(1), "127.0.0.1", port, 0.5, dict, nothing)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_machine_that_has_ended_for_good_tells_those_that_meet_again(
    leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If machine 1 leaves, machine 0's launcher may still listen on the port for a while."""
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.3)
    port = int(free_port())
    leaves = node(leaver, after="job")
    stays = node(1 - leaver, after="job")
    launcher = socket.create_server(("127.0.0.1", port)) if leaver else None
    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(preflight.abort, leaves, "127.0.0.1", port, "has ended with code 1", 60.0)
        if launcher:
            time.sleep(1.0)
            launcher.close()
        found = pool.submit(preflight.preflight, stays, "127.0.0.1", port, 20.0, dict, nothing).exception(30)
        assert isinstance(found, NonRetryableError)
        assert str(found) == f"machine {leaver} ({HOSTS[leaver]}) has ended with code 1"
        gone.result(10)


def test_machines_that_all_leave_do_not_wait_for_each_other() -> None:
    port = int(free_port())
    with ThreadPoolExecutor(3) as pool:
        leaving = [
            pool.submit(preflight.abort, node(number, 3, after="job"), "127.0.0.1", port, "has finished", 60.0)
            for number in range(3)
        ]
        for each in leaving:
            each.result(20)


def test_who_leaves_is_no_business_of_another_job() -> None:
    port = int(free_port())
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(preflight.abort, node(0, after="job"), "127.0.0.1", port, "has finished", 2.0)
        with pytest.raises(NonRetryableError, match="did not reach machine 0"):
            preflight.preflight(node(1, after="another"), "127.0.0.1", port, 1.0, dict, nothing)
        gone.result(10)


def test_a_machine_that_comes_late_gets_the_plan_and_one_that_stops_ends_nobody() -> None:
    """A late machine does not wait for others. Its options are compared as at the start, and it may come again."""
    port = int(free_port())
    plan = {"job": "j", "port": "1"}
    seen = list[Mapping[str, Any]]()
    late = functools.partial(preflight.preflight, address="127.0.0.1", port=port, limit=10.0, plan=dict)
    with preflight.admit_late(node(0), "127.0.0.1", port, Rendezvous((2, 2), "", "", plan)):
        for _ in range(2):
            met = late(node(1), prepare=seen.append)
            assert (met.ranks, met.plan, met.master) == ((2, 2), plan, "127.0.0.1")
        with pytest.raises(ConfigError, match=r"--epochs is 3 on machine 0 .* and 4 on machine 1"):
            late(node(1, options={**NODE.options, "epochs": 4}), prepare=nothing)
        preflight.abort(node(1, after="j"), "127.0.0.1", port, "was stopped by signal 15", 60.0)  # abort does not wait
    assert seen == [plan, plan]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


# --- the launch scripts ------------------------------------------------------------------------------------------


def machines(project: ScratchProject, *each: tuple[str, ...], code: str, **environ: str) -> list[subprocess.Popen[str]]:
    """Start a launch script for each machine. Each has its own run dir unless its arguments name one."""
    several = {"NNODES": str(len(each)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **environ}
    several.setdefault("SAMESTEP_SECRET", "a secret of the tests")
    started = []
    for number, words in enumerate(each):
        words = words if any(word.startswith("--run-dir") for word in words) else (*words, f"--run-dir=run-{number}")
        started.append(project.start(code, *words, environ={**several, "NODE_RANK": str(number)}))
    return started


NOTE = """
(run_dir / f"note-{nproc}").write_text(json.dumps({"environ": dict(os.environ), "options": options}))
"""


def test_the_machines_of_a_job_share_its_name_and_know_their_interface(project: ScratchProject) -> None:
    """All machines use the run dir of machine 0, as on a shared disk."""
    done = [end_of(process) for process in machines(project, ("2", "--run-dir=run"), ("3", "--run-dir=run"), code=NOTE)]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    first, second = (json.loads((project.run_dir / f"note-{n}").read_text()) for n in (2, 3))
    infos = [JobInfo.from_environ(each["environ"]) for each in (first, second)]
    assert infos[0].job == infos[1].job != ""
    for note, info in zip((first, second), infos, strict=True):
        assert (info.ranks, info.machines) == (None, 2)  # the total number of ranks is left out
        assert note["environ"]["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
        assert f"--run-dir={project.run_dir}" in note["options"]
    assert "--resume" in first["options"]
    assert "--resume" not in second["options"]  # only machine 0 resolves --resume


def test_the_second_machine_takes_the_run_dir_that_the_first_chose(project: ScratchProject) -> None:
    template = ["{python}", "-c", "pass", "{options}", "--", "1", "--dataset=mnist-5k"]
    several = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SAMESTEP_SECRET": "one"}
    both = [project.script("toy", *template, environ={**several, "NODE_RANK": str(number)}) for number in (0, 1)]
    assert [end_of(process).returncode for process in both] == [0, 0]
    assert len(list((project.work / "runs" / "toy").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((("2",), ("2", "--epochs=2")), "error: --epochs is 1 on machine 0"),
        ((("2",), ("2", "--run-dir=file/run")), "): cannot make "),
    ],
)
def test_what_does_not_fit_is_the_same_line_on_all(project: ScratchProject, words: Any, message: str) -> None:
    Path(project.work, "file").touch()
    done = [end_of(process) for process in machines(project, *words, code="note()")]
    assert [(each.returncode, each.stdout) for each in done] == [(2, "")] * 2, done
    assert done[0].stderr == done[1].stderr
    assert message in done[0].stderr
    assert project.notes() == []


def test_other_data_on_the_second_machine_are_refused(project: ScratchProject) -> None:
    for name, byte in (("one", 0), ("other", 1)):
        folder = project.work / name / "mnist"
        folder.mkdir(parents=True)
        for kind, count in (("train", 60_000), ("t10k", 10_000)):
            header = b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
            (folder / f"{kind}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + header + bytes([byte]) * count * 784)
            (folder / f"{kind}-labels-idx1-ubyte").write_bytes(
                b"\0\0\x08\x01" + count.to_bytes(4, "big") + bytes(count)
            )
    several = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SAMESTEP_SECRET": "one"}
    both = []
    for number, name in enumerate(("one", "other")):
        words = ["{python}", "-c", "pass", "{options}", "--", "1", "--dataset=mnist", f"--data-dir={name}"]
        both.append(project.script("toy", *words, environ={**several, "NODE_RANK": str(number)}))
    done = [end_of(process) for process in both]
    assert [each.returncode for each in done] == [2, 2], done
    assert done[0].stderr == done[1].stderr
    assert "): its mnist in " in done[0].stderr
    assert list((project.work / "runs" / "toy").iterdir()) == []


def test_a_machine_that_is_stopped_while_all_wait_ends_all(project: ScratchProject) -> None:
    first, second, third = machines(project, ("2",), ("2",), ("2",), code="note()")
    third.kill()
    end_of(third)
    assert first.stderr is not None
    assert first.stderr.readline().startswith("waiting for machine 2 of 3")
    second.send_signal(signal.SIGTERM)
    done = end_of(first)
    assert (done.returncode, end_of(second).returncode) == (1, 143)
    assert re.fullmatch(r"error: machine 1 \(.+\) was stopped by signal 15\n", done.stderr)
    assert project.notes() == []


@pytest.mark.parametrize("leaver", [2, 3], ids=["machine 0", "machine 1"])
def test_a_machine_whose_ranks_failed_for_good_ends_the_others(project: ScratchProject, leaver: int) -> None:
    """Without a shared disk, the other machine has no file with the verdict, and would wait for a restart."""
    fails = f"""
if nproc == "{leaver}":
    told = {{"code": 2, "job": job_info["job"]}}
    (run_dir / "log" / "no-restart").write_text(json.dumps(told))
else:
    time.sleep(2)
sys.exit(1)
"""
    done = [end_of(process) for process in machines(project, ("2",), ("3",), code=fails)]
    gone, left = done if leaver == 2 else done[::-1]
    assert (gone.returncode, left.returncode) == (2, 1)
    assert re.search(rf"^error: machine {leaver - 2} \(.+\) has ended with code 2", left.stderr, re.MULTILINE), left


def test_a_machine_that_has_finished_is_not_waited_for(project: ScratchProject) -> None:
    fails = 'time.sleep(1)\nsys.exit(nproc == "3")'
    first, second = (end_of(process) for process in machines(project, ("2",), ("3",), code=fails))
    assert (first.returncode, second.returncode) == (0, 1)
    assert re.search(r"^error: machine 0 \(.+\) has finished$", second.stderr, re.MULTILINE), second.stderr
