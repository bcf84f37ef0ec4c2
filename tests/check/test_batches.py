"""Test how the recorder assigns batches to steps, by the tensors that took part in a step (program/shapes.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from samestep_check import job

SHAPES = Path(__file__).with_name("program") / "shapes.py"
Cases = dict[str, tuple[list[list[int]], list[list[int]]]]


def recorded(folder: Path, script: Path) -> list[dict[str, Any]]:
    """Run a script with the recorder, and return the recorded events in order of time."""
    config: dict[str, Any] = {name: str(folder) for name in ("work", "source", "records")}
    config |= {"checkpoint": "none", "allowed": [tempfile.gettempdir()]}
    environ = {"PYTHONPATH": str(job.INSIDE), "SAMESTEP_INSIDE": json.dumps(config)}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    events = []
    for path in folder.glob("*.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(events, key=lambda event: event["time"])


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Return, for each loop, the recorded and the expected batches of each step. A loop's first batch is number 0."""
    found: Cases = {}
    for event in recorded(tmp_path_factory.mktemp("shapes"), SHAPES):
        if event["event"] == "begin_case":
            name = event["name"]
            numbers = list[int]()
            steps = list[list[int]]()
        elif event["event"] == "batch":
            numbers.append(event["number"])
        elif event["event"] == "step":
            steps.append(event["used"])
        elif event["event"] == "end_case":
            first = numbers[0]
            found[name] = [[number - first for number in used] for used in steps], event["wanted"]
        assert event["event"] != "unseen", event
    return found


@pytest.mark.parametrize("name", [
    line.partition("(")[0].removeprefix("def ")
    for before, line in zip(SHAPES.read_text().split("\n"), SHAPES.read_text().split("\n")[1:])
    if before == "@case"
])  # fmt: skip
def test_a_step_trains_on_the_batches_whose_tensors_took_part(shapes: Cases, name: str) -> None:
    """Compare the batches of each step. In these loops, a step may use several batches, or a batch may be skipped."""
    steps, wanted = shapes[name]
    assert steps == wanted


def test_a_wrapper_that_forwards_the_attributes_of_a_subset_is_no_second_subset(tmp_path: Path) -> None:
    events = recorded(tmp_path, SHAPES.with_name("subsets.py"))
    batches = [event["indices"] for event in events if event["event"] == "batch"]
    assert batches == [[11, 13, 15, 17]] * 2
    plain, wrapped = (event["subsets"] for event in events if event["event"] == "iterate")
    assert [length for length, _ in plain] == [4, 10]
    assert wrapped == plain
    assert not [event for event in events if event["event"] == "unseen"]


def test_a_script_may_close_the_recorders_file_and_fork(tmp_path: Path) -> None:
    """After the script has closed all files, its own file has the number of the recorder's descriptor."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "import samestep_record\n"
        "samestep_record.record('first')\n"
        "os.closerange(3, 100)\n"
        "with open('own.txt', 'w') as own:\n"
        "    samestep_record.record('second')\n"
        "    own.write('own')\n"
        "if os.fork() == 0:\n"
        "    samestep_record.record('third')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    events = [event["event"] for event in recorded(tmp_path, script)]
    assert events == ["start", "first", "second", "third"]
    assert (tmp_path / "own.txt").read_text() == "own"
    assert len([*tmp_path.glob("*.jsonl")]) == 2


def test_the_recorder_notices_each_draw_from_numpys_global_generator(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy\n"
        "from samestep_record import generators, record\n"
        "for source in (numpy.random.get_bit_generator(), numpy.random.PCG64(1)):\n"
        "    numpy.random.set_bit_generator(source)\n"
        "    begin = numpy.random.get_state(legacy=False)\n"
        "    states = [generators()['numpy'], generators()['numpy']]\n"
        "    numpy.random.rand()\n"
        "    states.append(generators()['numpy'])\n"
        "    numpy.random.set_state(begin)\n"
        "    states.append(generators()['numpy'])\n"
        "    record('states', states=states)\n"
    )
    found = [event["states"] for event in recorded(tmp_path, script) if event["event"] == "states"]
    assert len(found) == 2
    for first, again, drawn, restored in found:
        assert first == again == restored
        assert first != drawn


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
class Examples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.randn(2) if sys.argv[0].endswith("draws.py") else torch.zeros(2)
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        for _ in DataLoader(Examples(), num_workers=1, multiprocessing_context=method):
            pass
"""


@pytest.mark.parametrize(("name", "count"), [("draws.py", 2), ("constant.py", 0)])
def test_the_recorder_notices_random_numbers_of_workers_once(tmp_path: Path, name: str, count: int) -> None:
    """Draw random numbers in a forked worker and in a spawned one."""
    script = tmp_path / name
    script.write_text(WORKERS)
    events = recorded(tmp_path, script)
    assert [event["event"] for event in events].count("draws") == count
    assert not [event for event in events if event["event"] == "unseen"]


def test_the_recorder_reads_the_generator_of_the_current_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from samestep_record import generators, record\n"
        "assert 'cuda' not in generators()\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "states = []\n"
        "for offset in (0, 4, 0):\n"
        "    torch.cuda.get_rng_state = lambda: torch.tensor([7, offset], dtype=torch.uint8)\n"
        "    states.append(generators()['cuda'])\n"
        "record('states', states=states)\n"
    )
    (event,) = (event for event in recorded(tmp_path, script) if event["event"] == "states")
    first, drawn, restored = event["states"]
    assert first == restored != drawn


RARE_STATE = """
import torch
from torch.utils.data import DataLoader
class Relative(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})
    def step(self):
        for each in self.param_groups[0]["params"]:
            self.state[each]["moment"] = each.grad.clone()
model = torch.nn.Linear(2, 1)
edges = torch.sparse_coo_tensor([[0, 1], [1, 0]], [3.0, 4.0], (2, 2))
model.register_buffer("edges", edges)
model.register_buffer("compressed", edges.to_sparse_csr())
model.register_buffer("cache", torch.ones(3), persistent=False)
optimizer = Relative(model.parameters())
optimizer.state["count"] = 1
optimizer.state["none"] = None
for x in DataLoader(torch.ones(2, 2)):
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(x)
"""


def test_the_recorder_reads_sparse_buffers_and_states_without_a_tensor(tmp_path: Path) -> None:
    """Record an optimizer whose learning rate is None and whose state has entries that are no dictionaries."""
    script = tmp_path / "script.py"
    script.write_text(RARE_STATE)
    events = recorded(tmp_path, script)
    assert not [event for event in events if event["event"] == "unseen"]
    _, second = (event for event in events if event["event"] == "step")
    assert second["lr"] == [0.0]
    names = ["moment", "buffer edges", "buffer compressed", "weights"]
    assert [*second["state"]] == names
    assert second["state"]["buffer edges"] == second["state"]["buffer compressed"] == [1, 5.0, 0]


BROADCAST = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
for is_replica in (True, False):
    inner = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model = nn.Sequential(nn.parallel.DistributedDataParallel(inner) if is_replica else inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for x in DataLoader(torch.randn(8, 2), batch_size=4):
        model(x).sum().backward()
        optimizer.step()
"""


def test_buffers_below_a_replica_do_not_count_in_the_checksum(tmp_path: Path) -> None:
    """A module contains a DistributedDataParallel, which broadcasts buffers of BatchNorm in the next step."""
    script = tmp_path / "script.py"
    script.write_text(BROADCAST)
    digests = [event["digest"] for event in recorded(tmp_path, script) if event["event"] == "step"]
    assert digests[0] == digests[1]
    assert digests[2] != digests[3]


AVERAGE = """
import copy
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(4, 2)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    average.weight.data.mul_(0.5)
    for _ in range(3):
        with torch.no_grad():
            average(x)
"""


def test_the_recorder_notices_changes_through_data_and_the_precision(tmp_path: Path) -> None:
    """Call a moving average three times after each step, and train under autocast."""
    script = tmp_path / "script.py"
    script.write_text(AVERAGE)
    events = recorded(tmp_path, script)
    norms = [event["norm"] for event in events if event["event"] == "called"]
    assert len({*norms}) == len(norms) == 4
    assert [event["eps"] for event in events if event["event"] == "precision"] == [2**-7, 2**-23]
