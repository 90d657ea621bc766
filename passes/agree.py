"""Writes into a graph what the ranks have to agree on before it runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from torch import fx

from ..sharding.contract import Contract, line_of
from .graph import nodes
from .schedule_policy import DEFAULT, SchedulePolicy


@dataclass(frozen=True)
class Agree:
    """Gives the first launch the contract of all collectives. Numerics cannot change.

    ::

        launch_all_gather([s1, s2], bucket)  ->  launch_all_gather([s1, s2], bucket, contract)

    As an argument it is there on a hit of the compile caches too, where no pass runs.
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        launches = nodes.launches_of(graph)
        started = (line_of(nodes.bucket_of(launch), nodes.stage_of(launch)) for launch in launches)
        collectives = tuple(each for each in started if each is not None)  # a copy to the host is none
        if collectives:
            cluster = self.policy.cluster_for(nodes.device_of(graph))
            schedule = f"schedule: {replace(self.policy, cluster=None)!r}"
            digest = hashlib.sha256(repr(cluster).encode()).hexdigest()[:8]
            machine = f"cluster: {cluster.name}, {cluster.ranks_per_node} ranks on a node, constants {digest}"
            nodes.set_contract(launches[0], Contract(collectives, (schedule, machine)))
