"""List the programs of the scoreboard, and start each as its own pages describe."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import sources
from job import Job, Start, Told

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DIGITS = ROOT / "core" / "samestep" / "data" / "mnist-5k"
BIN = Path(sys.executable).parent


def free_port() -> int:
    """A port on which nothing listens now, and none that the kernel gives to a connection by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def torchrun(n: int, *program: str) -> list[str]:
    """A single machine's torchrun, as every one of these pages has it; its rendezvous on loopback."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*launcher, f"--nproc-per-node={n}", *program]


@dataclass(frozen=True)
class Setting:
    """The settings of a job. ``batch`` is the whole job's; most of the examples divide it by the world size."""

    n: int
    epochs: int
    batch: int
    timeout: int = 0  # seconds until our app must detect a hang, if not its default


class Subject:
    """A program of the scoreboard. Its class overrides the defaults that do not apply."""

    name: str
    packages: Sequence[str] = ("torch",)
    examples = 4000  # that it trains on
    saves = True  # checkpoints
    eval_group = True
    tests = 1000  # examples of its evaluation.
    batch = (
        480  # The samples per step of all ranks. An epoch has few steps, as other work on the machine slows each one.
    )
    heals = False  # Whether a restarted process gets the lost state from the other ranks.
    epochs_told = True
    pause = 0.05

    def origins(self) -> list[sources.File]:
        return sources.origin(self.name)

    def prepare(self, folder: Path, given: Path | None) -> None:
        """Put the program, and data where it looks for them, into the folder."""
        sources.put(self.name, folder, given)
        mnist(folder / "data" / "MNIST" / "raw")

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        """Return the processes to start. With ``again``, resume a training in the same folder, as a user would."""
        raise NotImplementedError

    def environ(self, setting: Setting) -> Mapping[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // setting.n)
        path = os.pathsep.join(str(each) for each in (HERE / "inside", ROOT / "core"))
        return {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(threads),
            "SCOREBOARD_PAUSE": str(self.pause),
            "SCOREBOARD_EPOCHS": str(setting.epochs),
            "SCOREBOARD_BATCH": str(setting.batch // setting.n),
        }

    def checkpoint(self, folder: Path) -> Path | None:
        """The file that holds the weights of its newest checkpoint."""
        raise NotImplementedError

    def steps(self, setting: Setting) -> int:
        """How many an undisturbed training has."""
        per_rank = -(-self.examples // setting.n)
        return setting.epochs * -(-per_rank // (setting.batch // setting.n))

    def told(self, folder: Path) -> Told:
        """Return the logs of all jobs of one training, which were started in turn."""
        return Told.read(*sorted(folder.glob("told-?")))

    def taken(self, job: Job, folder: Path) -> int:
        """How many steps a job has told by now, of the rank that is furthest; cheap, to be asked again and again."""
        return max((path.read_bytes().count(b'"event": "step"') for path in job.told.glob("*.jsonl")), default=0)

    def anew(self, folder: Path) -> bool:
        """Whether it took a step since it was last started again; of ours alone, whose log has no times."""
        raise NotImplementedError

    def victim(self, told: Told, folder: Path) -> int | None:
        """The process of the last rank."""
        return told.pid(max(told.ranks, default=-1))


def mnist(folder: Path) -> None:
    """mnist-5k as torchvision's MNIST finds it."""
    folder.mkdir(parents=True)
    for path in DIGITS.glob("*.gz"):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


class Ours(Subject):
    name = "mnist_ddp"

    def origins(self) -> list[sources.File]:
        return []

    def prepare(self, folder: Path, given: Path | None) -> None:
        pass

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        options = [f"--epochs={setting.epochs}", f"--global-batch-size={setting.batch}", "--dataset=mnist-5k"]
        options += ["--device=cpu", "--log-every=1", f"--run-dir={folder / 'run'}"]
        options += [f"--timeout={setting.timeout}"] if setting.timeout else []
        script = ["bash", str(ROOT / "scripts" / "run_mnist_ddp.sh"), str(setting.n)]
        return [Start([*script, *options], {"PYTHON": sys.executable})]

    def environ(self, setting: Setting) -> Mapping[str, str]:
        """It has no line of ours: what its tests use makes its ranks sleep, until it is started again."""
        slow = {"slow": [[rank, "input", 0, 1_000_000] for rank in range(setting.n)], "seconds": 0.05}
        path = os.pathsep.join(str(ROOT / each) for each in ("tests/common/faults", "core"))
        return {"SAMESTEP_FAULT": json.dumps(slow), "PYTHONPATH": path}

    def checkpoint(self, folder: Path) -> Path | None:
        found = sorted(folder.glob("run/checkpoints/step-*/model.safetensors"))
        return found[-1] if found else None

    def lines(self, folder: Path) -> list[dict[str, float]]:
        """The steps that its log has: each once, whatever happened."""
        path = folder / "run" / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [found for found in (json.loads(line) for line in lines) if "loss" in found]

    def told(self, folder: Path) -> Told:
        """Its own log; which samples a step has is a function of the step, which the ranks take them from."""
        from samestep.sharding import GlobalBatches

        with suppress(OSError, ValueError):
            header = json.loads((folder / "run" / "metrics.jsonl").read_text().split("\n")[0])
            n, batch = header["world"]["world_size"], header["options"]["global_batch_size"]
            shards = [GlobalBatches(self.examples, batch, header["options"]["seed"], r, n) for r in range(n)]
            length = -(-self.examples // batch)
            pids = [self.rank_pid(folder, rank) for rank in range(n)]
            found = []
            for rank, shard in enumerate(shards):
                events = []
                for line in self.lines(folder):
                    step = int(line["step"]) - 1
                    each = {"event": "step", "epoch": step // length, "batch": step % length, "loss": line["loss"]}
                    indices = [int(i) for i in shard.indices(step)]
                    events.append({**each, "indices": indices, "time": 0.0, "rank": rank, "pid": pids[rank]})
                found.append(events)
            return Told({rank: [events] for rank, events in enumerate(found) if events})
        return Told()

    def taken(self, job: Job, folder: Path) -> int:
        path = folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b'"loss": ') if path.exists() else 0

    def anew(self, folder: Path) -> bool:
        _, started_again, after = (folder / "run" / "metrics.jsonl").read_text().rpartition('{"resumed": ')
        return bool(started_again) and '"loss": ' in after

    def rank_pid(self, folder: Path, rank: int) -> int:
        return int(json.loads((folder / "run" / "log" / f"alive-{rank}").read_text())["pid"])


class PyTorch(Subject):
    name = "pytorch"
    eval_group = False

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        program = [str(self.origins()[0].name), str(setting.epochs), "1", f"--batch_size={setting.batch // setting.n}"]
        return [Start(torchrun(setting.n, *program))]

    def checkpoint(self, folder: Path) -> Path | None:
        found = folder / "snapshot.pt"
        return found if found.exists() else None


class PyTorchRestarts(PyTorch):
    """The same, restarted by torchrun."""

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        (start,) = super().starts(setting, folder, again)
        command = list(start.command)
        command.insert(command.index("--standalone") + 1, "--max-restarts=3")
        return [Start(command)]


class Accelerate(Subject):
    name = "accelerate"
    packages = ("torch", "accelerate", "timm")
    examples = 3200
    tests = 800

    def prepare(self, folder: Path, given: Path | None) -> None:
        """The training digits as its data set's files: <class>_<number>.jpg."""
        from PIL import Image
        from samestep.data.datasets import load

        sources.put(self.name, folder, given)
        (folder / "images").mkdir()
        digits = load("mnist-5k", folder)
        for number, (image, label) in enumerate(zip(digits.train_images, digits.train_labels)):
            Image.fromarray(image).save(folder / "images" / f"digit-{label}_{number}.jpg")

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        program = [self.origins()[0].name, "--cpu", "--data_dir=images", "--checkpointing_steps=epoch"]
        program += ["--output_dir=saved"]
        newest = self.newest(folder)
        if again and newest:
            program += [f"--resume_from_checkpoint={newest}"]
        return [Start(torchrun(setting.n, *program))]

    def newest(self, folder: Path) -> str | None:
        found = sorted(folder.glob("saved/epoch_*"), key=lambda path: int(path.name.partition("_")[2]))
        return f"saved/{found[-1].name}" if found else None

    def checkpoint(self, folder: Path) -> Path | None:
        newest = self.newest(folder)
        return folder / newest / "model.safetensors" if newest else None


class Lightning(Subject):
    name = "lightning"
    packages = ("torch", "lightning")
    examples = 3500

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        program = [sys.executable, self.origins()[0].name, "--trainer.accelerator=cpu", "--trainer.strategy=ddp"]
        program += [f"--trainer.devices={setting.n}", f"--trainer.max_epochs={setting.epochs}"]
        program += ["--trainer.enable_progress_bar=false"]
        return [Start([*program, f"--data.batch_size={setting.batch // setting.n}"])]

    def environ(self, setting: Setting) -> Mapping[str, str]:
        return {**super().environ(setting), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def checkpoint(self, folder: Path) -> Path | None:
        found = sorted(folder.glob("lightning_logs/*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None


class TorchFT(Subject):
    name = "torchft"
    packages = ("torch", "torchft")
    examples = 1024
    saves = eval_group = epochs_told = False
    heals = True

    def prepare(self, folder: Path, given: Path | None) -> None:
        sources.put(self.name, folder, given)

    def steps(self, setting: Setting) -> int:
        return setting.epochs * 20

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        port = free_port()
        lighthouse = [str(BIN / "torchft_lighthouse"), "--min_replicas=1", "--quorum_tick_ms=100"]
        starts = [
            Start([*lighthouse, "--join_timeout_ms=10000", f"--bind=127.0.0.1:{port}"], {"RUST_BACKTRACE": "1"}, False)
        ]
        for replica in range(setting.n):
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
            run += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=10"]
            environ = {"REPLICA_GROUP_ID": str(replica), "NUM_REPLICA_GROUPS": str(setting.n)}
            environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
            starts.append(Start([*run, self.origins()[0].name], environ))
        return starts

    def environ(self, setting: Setting) -> Mapping[str, str]:
        return {**super().environ(setting), "SCOREBOARD_STEPS": str(self.steps(setting))}


class Horovod(Subject):
    name = "horovod"
    packages = ("torch", "horovod")
    saves = False

    def command(self, setting: Setting, *words: str) -> list[str]:
        launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache", "-np", str(setting.n)]
        program = [self.origins()[0].name, "--no-cuda", f"--epochs={setting.epochs}"]
        return [*launcher, *words, sys.executable, *program, f"--batch-size={setting.batch // setting.n}"]

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        return [Start(self.command(setting), {"HOME": str(folder)})]  # for its lock file


class HorovodElastic(Horovod):
    """On two hosts, which are names of this one: a host on which a rank failed gets no other."""

    name = "horovod-elastic"
    heals = True

    def prepare(self, folder: Path, given: Path | None) -> None:
        super().prepare(folder, given)
        (folder / "discover_hosts.sh").write_text('#!/bin/sh\ncat "$(dirname "$0")/hosts"\n')
        (folder / "discover_hosts.sh").chmod(0o755)

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        slots = {"localhost": -(-setting.n // 2), "127.0.0.1": setting.n // 2}
        (folder / "hosts").write_text("".join(f"{host}:{n}\n" for host, n in slots.items() if n))
        words = ["--network-interfaces=lo", "--min-np=1", f"--host-discovery-script={folder / 'discover_hosts.sh'}"]
        return [Start(self.command(setting, *words), {"HOME": str(folder)})]


class Ray(Subject):
    name = "ray"
    packages = ("torch", "ray")
    saves = False

    def prepare(self, folder: Path, given: Path | None) -> None:
        sources.put(self.name, folder, given)
        mnist(folder / "data" / "FashionMNIST" / "raw")

    def starts(self, setting: Setting, folder: Path, again: bool) -> list[Start]:
        # Its workers are started in another folder.
        return [Start([sys.executable, self.origins()[0].name], {"SCOREBOARD_DATA": str(folder / "data")})]

    def environ(self, setting: Setting) -> Mapping[str, str]:
        # It wants a core for each rank, and waits for one that the machine does not have.
        cores = json.dumps({"CPU": max(setting.n, len(os.sched_getaffinity(0)))})
        return {**super().environ(setting), "SCOREBOARD_RANKS": str(setting.n), "RAY_OVERRIDE_RESOURCES": cores}


SUBJECTS: dict[str, Subject] = {
    "mnist_ddp": Ours(),
    "pytorch": PyTorch(),
    "pytorch-restarts": PyTorchRestarts(),
    "accelerate": Accelerate(),
    "lightning": Lightning(),
    "horovod": Horovod(),
    "horovod-elastic": HorovodElastic(),
    "torchft": TorchFT(),
    "ray": Ray(),
}


def steps_taken(told: Told) -> int:
    """Updates of the whole job, as the rank that is furthest has them; each as often as it was made."""
    return max((len(told.steps(rank)) for rank in told.ranks), default=0)
