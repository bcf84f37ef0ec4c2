"""Run torchrun's agent in this process, by ``python -m samestep_launch.torchrun [torchrun's arguments]``.

With ``--start-method=fork``, this process imports torch and the program once, and the agent forks the ranks from this
process. Otherwise the agent starts a Python process for each rank, as torchrun does. On one machine, the agent's store
listens only at ``--master-addr``.
"""

from __future__ import annotations

from samestep_launch.program import importing


def main() -> None:
    """Run the agent in this process."""
    with importing():  # torch imports numpy, which must not start threads
        from samestep_launch import elastic_agent

    elastic_agent.main()


if __name__ == "__main__":
    main()
