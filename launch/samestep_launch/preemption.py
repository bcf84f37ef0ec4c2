"""Watch for the notice by which a cloud provider takes this machine back, for --preemption-notice.

A thread of the launch script asks the machine's metadata service every `POLL_SECONDS`, or looks for a file. At a notice
the job stops as it does at TERM. An error of the service never stops a job.

The services, on a link-local address that only this machine reaches:

- AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, by IMDSv2's tokens
- Google Cloud: https://cloud.google.com/compute/docs/instances/create-use-preemptible
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

This module uses the standard library alone.
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

from samestep_launch.supervise import STOPS, print_stderr

POLL_SECONDS = 5.0
TIMEOUT = 1.0  # seconds for a request
MAX_BYTES = 2**16  # of an answer
URL = "http://169.254.169.254"  # of the metadata service of each provider
URL_VARIABLE = "SAMESTEP_METADATA_URL"
TTL = "60"  # seconds; each look takes a new token
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
DMI = Path("/sys/class/dmi/id")
_FILE = "file:"
_TEXT = untrusted.text(100)


class Notice(NamedTuple):
    """A notice of preemption.

    Attributes:
        text: who will do what.
        deadline: when, as the provider writes it; "" if the notice has none.
    """

    text: str
    deadline: str = ""

    def __str__(self) -> str:
        """Return one line for the log."""
        at = f" at {shown(self.deadline)}" if self.deadline else ""
        return f"notice of preemption: {shown(self.text, limit=1000)}{at}"


Ask = Callable[[], Optional[Notice]]


class Answer(NamedTuple):
    """An answer of the service."""

    status: int
    text: str

    def checked(self) -> str:
        """Return the text. Raises ValueError if the request did not succeed."""
        if self.status != http.client.OK:
            raise ValueError(f"HTTP status {self.status}")
        return self.text


class Service:
    """The metadata service of this machine. Requests use no proxy, and follow no redirection."""

    def __init__(self, url: str = URL) -> None:
        """Take the address, as `metadata_url` returns it."""
        self.url = url
        self._place = urllib.parse.urlsplit(url).netloc

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Return the answer to a request. Raises OSError, HTTPException, and ValueError for a header of two lines.

        Args:
            path: what to ask for, such as /latest/api/token.
            headers: headers of the request.
            method: the request's method.
        """
        connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.read(MAX_BYTES).decode(errors="replace"))


# --- the providers. Each function returns the notice or None, and raises OSError, HTTPException or ValueError. -------


def ask_aws(service: Service) -> Notice | None:
    """Return AWS's notice to a spot instance."""
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
    """Return Google Cloud's notice, which has no deadline: the machine stops 30 seconds later."""
    text = service.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).checked()
    if text.strip() not in ("TRUE", "FALSE"):
        raise ValueError(f"{shown(repr(text), limit=40)} in place of TRUE or FALSE")
    if text.strip() == "TRUE":
        return Notice("Google Cloud preempts this machine")
    return None


def ask_azure(service: Service) -> Notice | None:
    """Return Azure's notice to this machine. Its Scheduled Events name other machines of the same group, too."""
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
    """Return whether an event ends a machine. Raises ValueError for anything but an event."""
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
    """Return the path of ``file:PATH``; None for a provider."""
    return Path(source[len(_FILE) :]) if source.startswith(_FILE) else None


def metadata_url(environ: Mapping[str, str]) -> str:
    """Return the address of the metadata service. Raises ConfigError for a variable that is none."""
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
    """Return the provider that a machine's DMI strings name, a key of PROVIDERS; None if they name another one.

    Args:
        folder: has the strings as files.
    """
    if any("Amazon EC2" in _dmi(folder, name) for name in ("sys_vendor", "bios_vendor")):
        return "aws"
    if "Google" in _dmi(folder, "product_name"):
        return "gcp"
    if _dmi(folder, "chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":  # Hyper-V elsewhere has another one
        return "azure"
    return None


def _dmi(folder: Path, name: str) -> str:
    try:
        return untrusted.read_text(folder / name, max_bytes=200).strip()
    except OSError:
        return ""


def find_source(source: str, service: Service, dmi: Path = DMI) -> Ask | None:
    """Return the function that looks for a notice; None if ``auto`` finds no provider, which is reported.

    Args:
        source: value of --preemption-notice.
        service: the metadata service.
        dmi: folder of DMI strings.
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
    """Return a notice if the file exists."""
    return Notice(f"{path} exists") if path.exists() else None


# --- the thread ------------------------------------------------------------------------------------------------------


class Watcher:
    """Looks for a notice until there is one, or until `stop`."""

    def __init__(
        self, source: str, ask: Ask, act: Callable[[Notice], None], place: str = "", pause: float = POLL_SECONDS
    ) -> None:
        """Prepare to look.

        Args:
            source: value of --preemption-notice, for the warning.
            ask: returns the notice, or None.
            act: called once with the notice, but not after `stop`.
            place: the address that is asked, for the warning.
            pause: seconds between two looks.
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
        """Look for the notice, and act on it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [*STOPS, signal.SIGHUP])  # signals are the main thread's
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
        """Print the first problem."""
        if not self._has_warned:
            self._has_warned = True
            what = f"--preemption-notice {shown(self._source)}: {self._place}{shown(problem, limit=200)}"
            print_stderr(f"warning: {what}: training continues, and looks again every {self._pause:g} s")

    def stop(self) -> None:
        """Look and act no more."""
        with self._acting:
            self._stopped.set()


@contextlib.contextmanager
def watch(source: str, record: Callable[[str], None]) -> Iterator[None]:
    """Look for a notice while the context is open, and at a notice stop this process by TERM.

    Args:
        source: value of --preemption-notice.
        record: called with one line about the notice before the stop.

    Raises:
        ConfigError: the address of the metadata service is none.
    """
    service = Service(metadata_url(os.environ))
    ask = find_source(source, service)
    if ask is None:
        yield
        return

    def act(notice: Notice) -> None:
        print_stderr(str(notice))
        record(str(notice))
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    place = "" if notice_file(source) else f"{service.url}: "
    watcher = Watcher(source, ask, act, place=place)
    threading.Thread(target=watcher.run, name="preemption notice", daemon=True).start()
    try:
        yield
    finally:
        watcher.stop()
