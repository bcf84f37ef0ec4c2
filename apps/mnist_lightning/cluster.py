"""Pass the rank and world size that samestep detected to Lightning."""

from __future__ import annotations

from lightning_fabric.plugins import ClusterEnvironment
from samestep.env import World


class SamestepEnvironment(ClusterEnvironment):
    """Describe a job whose processes and process group already exist, so that Lightning creates neither."""

    creates_processes_externally = True
    main_address = ""  # not used, because the process group exists
    main_port = 0

    def __init__(self, world: World) -> None:
        self.world = world

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self.world.world_size

    def global_rank(self) -> int:
        return self.world.rank

    def local_rank(self) -> int:
        return self.world.local_rank or 0

    def node_rank(self) -> int:
        return self.world.node_rank or 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass
