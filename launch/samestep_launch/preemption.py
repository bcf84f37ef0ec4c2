"""Implement --preemption-notice, which watches for a cloud provider's notice that this machine will stop.

A thread of the launch script polls the machine's metadata service, or a file, every `POLL_SECONDS` seconds. After a
notice, the job stops as it does after TERM. An error of the service never stops a job.

The metadata services have a link-local address, which only this machine can reach. These pages describe them:

- AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, with IMDSv2's tokens
- Google Cloud: https://cloud.google.com/compute/docs/instances/create-use-preemptible
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Optional

from samestep import ConfigError, untrusted
from samestep.untrusted import shown

from samestep_launch.supervise import CONSOLE_SECONDS, HANDLED, print_stderr, stop_signals

POLL_SECONDS = 5.0
TIMEOUT = 1.0  # time limit of a request in seconds
MAX_BYTES = 2**16  # maximum number of bytes that are read from a response
URL = "http://169.254.169.254"  # metadata service of AWS, Google Cloud and Azure
URL_VARIABLE = "SAMESTEP_METADATA_URL"
TTL = "60"  # lifetime of a token in seconds; each poll requests a new token
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
DMI = Path("/sys/class/dmi/id")
_FILE = "file:"
_TEXT = untrusted.text(100)


class Notice(NamedTuple):
    """A notice of preemption.

    Attributes:
        text: the provider and its action, such as "AWS will terminate this machine", or the file that exists.
        deadline: time of the action, in the provider's format; "" if the notice has none.
    """

    text: str
    deadline: str = ""

    def __str__(self) -> str:
        """Return one line for the log."""
        at = f" at {shown(self.deadline)}" if self.deadline else ""
        return f"notice of preemption: {shown(self.text, limit=1000)}{at}"


Ask = Callable[[], Optional[Notice]]


class Answer(NamedTuple):
    """The HTTP status and the text of a response."""

    status: int
    text: str

    def checked(self) -> str:
        """Return the text.

        Raises:
            ValueError: the status is not 200.
        """
        if self.status != http.client.OK:
            raise ValueError(f"HTTP status {self.status}")
        return self.text


class Service:
    """A client of this machine's metadata service. Requests bypass proxies and do not follow redirections."""

    def __init__(self, url: str = URL) -> None:
        """Store the service's address, as `metadata_url` returns it."""
        self.url = url
        self._place = urllib.parse.urlsplit(url).netloc

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Send a request and return the response.

        Args:
            path: path of the resource, such as /latest/api/token.
            headers: header values of the HTTP request, by name.
            method: method of the HTTP request.

        Raises:
            OSError, HTTPException: the request failed.
            ValueError: a header contains a line break.
        """
        connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.read(MAX_BYTES).decode(errors="replace"))


# --- the providers. Each function returns the notice or None, and raises OSError, HTTPException or ValueError. -------


def ask_aws(service: Service) -> Notice | None:
    """Return AWS's interruption notice for this spot instance; None without a notice."""
    asked = {"X-aws-ec2-metadata-token-ttl-seconds": TTL}
    token = service.ask("/latest/api/token", asked, method="PUT").checked()
    path = "/latest/meta-data/spot/instance-action"
    answer = service.ask(path, {"X-aws-ec2-metadata-token": token.strip()})
    if answer.status == http.client.NOT_FOUND:
        return None
    action = untrusted.parse_object(answer.checked())
    untrusted.check(action, {"action": _TEXT, "time": _TEXT})
    return Notice(f"AWS will {action['action']} this machine", action["time"])


def ask_gcp(service: Service) -> Notice | None:
    """Return Google Cloud's notice, which has no deadline; None without a notice.

    Google Cloud stops the machine 30 seconds after the notice.
    """
    text = service.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).checked()
    if text.strip() not in ("TRUE", "FALSE"):
        raise ValueError(f"{shown(repr(text), limit=40)} in place of TRUE or FALSE")
    if text.strip() == "TRUE":
        return Notice("Google Cloud preempts this machine")
    return None


def ask_azure(service: Service) -> Notice | None:
    """Return Azure's notice for this machine; None without a notice.

    Azure's Scheduled Events also list events of other machines in the same group.
    """
    header = {"Metadata": "true"}
    content = untrusted.parse_object(service.ask(AZURE_EVENTS, header).checked())
    events = content.get("Events")
    if not isinstance(events, list):
        raise ValueError("an answer without Events")
    endings = [event for event in events if _is_ending(event)]
    if not endings:
        return None
    name = service.ask(AZURE_NAME, header).checked().strip()
    for event in endings:
        if name in event["Resources"]:
            return Notice(f"Azure's event {event['EventType']}", event["NotBefore"])
    return None


def _is_ending(event: object) -> bool:
    """Return whether an event preempts or terminates a machine.

    Raises:
        ValueError: the event is malformed.
    """
    if not isinstance(event, dict):
        raise ValueError("an event that is no object")
    untrusted.check(event, {"EventType": _TEXT})
    if event["EventType"] not in ("Preempt", "Terminate"):
        return False
    untrusted.check(event, {"Resources": lambda value: isinstance(value, list), "NotBefore": _TEXT})
    return True


PROVIDERS = {"aws": ask_aws, "gcp": ask_gcp, "azure": ask_azure}


# --- the option ------------------------------------------------------------------------------------------------------


def notice_file(source: str) -> Path | None:
    """Return PATH if ``source`` is ``file:PATH``; None if ``source`` is ``auto`` or a provider."""
    return Path(source[len(_FILE) :]) if source.startswith(_FILE) else None


def metadata_url(environ: Mapping[str, str]) -> str:
    """Return the metadata service's address: SAMESTEP_METADATA_URL, or `URL` by default.

    Raises:
        ConfigError: SAMESTEP_METADATA_URL has neither the form http://HOST nor http://HOST:PORT.
    """
    url = environ.get(URL_VARIABLE) or URL
    problem = ConfigError(f"{URL_VARIABLE}={shown(url)} is no address: write http://HOST or http://HOST:PORT")
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        raise problem from None
    if not is_address or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        raise problem
    return url


def provider_of(folder: Path = DMI) -> str | None:
    """Return the key of PROVIDERS that this machine's DMI strings identify; None for another provider.

    Args:
        folder: folder with one file for each DMI string.
    """
    if any("Amazon EC2" in _dmi(folder, name) for name in ("sys_vendor", "bios_vendor")):
        return "aws"
    if "Google" in _dmi(folder, "product_name"):
        return "gcp"
    if _dmi(folder, "chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":  # Hyper-V outside Azure has another tag
        return "azure"
    return None


def _dmi(folder: Path, name: str) -> str:
    try:
        return untrusted.read_text(folder / name, max_bytes=200).strip()
    except OSError:
        return ""


def find_source(source: str, service: Service, dmi: Path = DMI) -> Ask | None:
    """Return the function that checks for a notice. If ``auto`` finds no known provider, warn and return None.

    Args:
        source: value of --preemption-notice.
        service: client of the metadata service.
        dmi: folder with one file for each DMI string.
    """
    path = notice_file(source)
    if path is not None:
        return functools.partial(_ask_file, path.absolute())
    provider: str | None = source
    if source == "auto":
        provider = provider_of(dmi)
    if provider is None:
        print_stderr(
            "warning: --preemption-notice auto: the DMI strings of this machine name neither AWS nor Google Cloud nor "
            "Azure, so no notice can come: name the provider or file:PATH"
        )
        return None
    return functools.partial(PROVIDERS[provider], service)


def _ask_file(path: Path) -> Notice | None:
    """Return a notice if the file exists, else None."""
    return Notice(f"{path} exists") if path.exists() else None


# --- the thread ------------------------------------------------------------------------------------------------------


class Watcher:
    """A loop that checks for a notice until a notice arrives or `stop` is called."""

    def __init__(
        self, source: str, ask: Ask, act: Callable[[Notice], None], place: str = "", pause: float = POLL_SECONDS
    ) -> None:
        """Store the settings; `run` starts the loop.

        Args:
            source: value of --preemption-notice, for the warning.
            ask: function that returns the notice, or None.
            act: function that is called once with the notice, but not after `stop`.
            place: address of the metadata service, for the warning.
            pause: seconds between two checks.
        """
        self._source = source
        self._ask = ask
        self._act = act
        self._place = place
        self._pause = pause
        self._has_warned = False
        self._stopped = threading.Event()
        self._acting = threading.Lock()

    def run(self) -> None:
        """Check for a notice until a notice arrives or `stop` is called, and call ``act`` with the notice."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # the main thread must get the signals
        while not self._stopped.is_set():
            notice = self._look()
            if notice:
                with self._acting:
                    if not self._stopped.is_set():
                        self._act(notice)
                return
            self._stopped.wait(self._pause)

    def _look(self) -> Notice | None:
        try:
            return self._ask()
        except TimeoutError:
            self._warn(f"no answer within {TIMEOUT:g} s")
        except OSError as error:
            self._warn(error.strerror or str(error))
        except (ValueError, http.client.HTTPException) as error:
            self._warn(f"a wrong answer: {type(error).__name__}: {error}")
        return None

    def _warn(self, problem: str) -> None:
        """Print a warning for the first problem only."""
        if not self._has_warned:
            self._has_warned = True
            what = f"--preemption-notice {shown(self._source)}: {self._place}{shown(problem, limit=200)}"
            print_stderr(f"warning: {what}: training continues, and looks again every {self._pause:g} s")

    def stop(self) -> None:
        """End the loop; ``act`` is not called afterwards."""
        with self._acting:
            self._stopped.set()


@contextlib.contextmanager
def watch(source: str, record: Callable[[str], None]) -> Iterator[None]:
    """Check for a notice inside this context, and send TERM to the main thread when a notice arrives.

    Args:
        source: value of --preemption-notice.
        record: function that is called with one line about the notice, before TERM is sent.

    Raises:
        ConfigError: SAMESTEP_METADATA_URL has neither the form http://HOST nor http://HOST:PORT.
    """
    service = Service(metadata_url(os.environ))
    ask = find_source(source, service)
    if ask is None:
        yield
        return

    has_notice = threading.Event()

    def act(notice: Notice) -> None:
        print_stderr(str(notice), limit=CONSOLE_SECONDS)
        record(str(notice))
        has_notice.set()
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def handle(number: int, frame: object) -> None:
        if has_notice.is_set():  # any other TERM remains ignored
            stop_signals.handle(number, frame)

    place = "" if notice_file(source) else f"{service.url}: "
    watcher = Watcher(source, ask, act, place=place)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:  # a batch script's `trap '' TERM` must not hide the notice
        signal.signal(signal.SIGTERM, handle)
    threading.Thread(target=watcher.run, name="preemption notice", daemon=True).start()
    try:
        yield
    finally:
        watcher.stop()
