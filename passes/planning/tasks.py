"""What a schedule places: tasks in a graph's compute, actions on them, and the memory that they take.

A task is a bucket of requests as the schedule sees it. Positions count compute nodes; "at position p" means before
compute node p runs, and the position after the last one is the end of the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ..cost import Cluster
from ..kinds import Request

Members = tuple[Request, ...]  # of a bucket: requests of one kind that share a collective


class Stage(NamedTuple):
    """One operation of a task."""

    us: float  # time on the lane
    lane: str = ""  # operations on one lane run one after the other


@dataclass(frozen=True)
class Task:
    """A bucket; times are in microseconds.

    The memory of a task that is started ahead of its use are ``output_bytes``, from the launch to the last read. Of
    any other it is ``inputs``, each from the compute node that makes it until the first stage is waited for.
    """

    stages: tuple[Stage, ...]
    ready: int  # position at which all inputs exist
    needed: int  # position of the first compute node that reads a result
    last: int = 0  # position of the last one, of what is started ahead
    output_bytes: int = 0  # without what the user keeps unsharded until backward
    inputs: tuple[tuple[int, int], ...] = ()  # position of the node that makes it, -1 for a graph input, and bytes
    is_ahead: bool = True
    pack_us: float = 0.0  # compute time before the launch
    unpack_us: float = 0.0  # compute time after the first wait

    @property
    def us(self) -> float:
        """Time on all lanes."""
        return sum(stage.us for stage in self.stages)

    @cached_property
    def input_bytes(self) -> int:
        """Of all inputs."""
        return sum(size for _, size in self.inputs)


def task_of(bucket: Members, cluster: Cluster) -> Task:
    """Return the task of a bucket."""
    first = bucket[0]
    times = first.kind.times(bucket, cluster)
    return Task(
        tuple(Stage(us, lane.name) for us, lane in zip(times.stages_us, first.lanes, strict=True)),
        ready=max(request.ready for request in bucket),
        needed=min(request.needed for request in bucket),
        last=max(request.last for request in bucket),
        output_bytes=sum(r.bytes - r.kept_bytes for r in bucket) if first.kind.is_ahead else 0,
        inputs=tuple((request.made, request.bytes) for request in bucket if request.made is not None),
        is_ahead=first.kind.is_ahead,
        pack_us=times.pack_us,
        unpack_us=times.unpack_us,
    )


@dataclass(frozen=True)
class Load:
    """One graph's work: compute in a fixed order, and the tasks to place in it, in any order."""

    compute_us: tuple[float, ...]  # estimated time of each compute node
    tasks: tuple[Task, ...]
    compute_blocked_fraction: float = 0.0  # see :class:`Cluster`

    @cached_property
    def clock(self) -> list[float]:
        """When each position is reached by compute alone, microseconds."""
        return [0.0, *accumulate(self.compute_us)]

    @cached_property
    def ahead(self) -> list[tuple[int, Task]]:
        """The tasks that are started ahead of their use, each with its index."""
        return [(index, task) for index, task in enumerate(self.tasks) if task.is_ahead]

    @cached_property
    def behind(self) -> list[tuple[int, Task]]:
        """The tasks that are started as soon as their inputs exist, each with its index."""
        return [(index, task) for index, task in enumerate(self.tasks) if not task.is_ahead]


@dataclass(frozen=True)
class Requests:
    """A graph's compute and its requests, those of each kind in the order in which buckets are filled."""

    compute_us: tuple[float, ...]
    each: tuple[Request, ...]
    cluster: Cluster

    def load(self, buckets: Iterable[Members]) -> Load:
        """Return what a schedule has to place for these buckets."""
        return self.load_of(task_of(bucket, self.cluster) for bucket in buckets)

    def load_of(self, tasks: Iterable[Task]) -> Load:
        """Return the same, for the tasks of buckets."""
        return Load(self.compute_us, tuple(tasks), self.cluster.compute_blocked_fraction)

    def compressed(self) -> tuple[Requests, list[int]]:
        """Return the same requests with one position for each run of compute that nothing begins or ends in.

        The list tells for each of its positions, the end included, the one before.
        """
        marks = {0, len(self.compute_us)}
        for request in self.each:
            marks |= {request.ready, request.needed}
            marks |= {request.last + 1} if request.kind.is_ahead else {request.made or 0}
        positions = sorted(mark for mark in marks if 0 <= mark <= len(self.compute_us))

        def within(position: int) -> int:
            return bisect_right(positions, position) - 1

        each = tuple(
            replace(
                request,
                ready=within(request.ready),
                needed=within(request.needed),
                last=within(request.last),
                made=None if request.made is None else within(request.made),
            )
            for request in self.each
        )
        clock = [0.0, *accumulate(self.compute_us)]
        return Requests(tuple(clock[b] - clock[a] for a, b in pairwise(positions)), each, self.cluster), positions


@dataclass(frozen=True)
class Action:
    """The launch of a task's stage, or the wait for it, at a position."""

    position: int
    verb: Literal["launch", "wait"]
    task: int  # index
    stage: int = 0


@dataclass(frozen=True)
class Plan:
    """A schedule as it is decided, emitted and inspected: the tasks, one for each bucket, and what starts when."""

    buckets: tuple[Members, ...]
    load: Load  # by nominal times
    actions: tuple[Action, ...]  # in order
    bound_bytes: int  # on :func:`bytes_in_flight`


# ---- memory ----


def least_bytes(load: Load) -> list[int]:
    """Return, for each position, the bytes in flight while it runs if everything is launched as late as possible
    and every first stage is waited for at once: what no schedule of these buckets can go below.
    """
    return bytes_between(load, [task.needed for _, task in load.ahead], [task.ready for _, task in load.behind])


def bytes_in_flight(load: Load, actions: Iterable[Action]) -> list[int]:
    """Return, for each position, the bytes in flight while it runs under a schedule."""
    at = {(action.verb, action.task): action.position for action in actions if action.stage == 0}
    return bytes_between(
        load, [at["launch", index] for index, _ in load.ahead], [at["wait", index] for index, _ in load.behind]
    )


def bytes_between(load: Load, launched: Iterable[int], reduced: Iterable[int]) -> list[int]:
    """Return the bytes in flight at each position, given where tasks start ahead and where the others are done."""
    change = [0] * (len(load.compute_us) + 2)
    for (_, task), start in zip(load.ahead, launched, strict=True):
        change[start] += task.output_bytes
        change[task.last + 1] -= task.output_bytes
    for (_, task), end in zip(load.behind, reduced, strict=True):
        for made, size in task.inputs:
            change[max(made, 0)] += size
        change[end] -= task.input_bytes
    return list(accumulate(change))[:-1]


def alive_at(task: Task) -> tuple[int, int]:
    """Return the first and the last position at which even the latest schedule holds the task's memory."""
    if task.is_ahead:
        return task.needed, task.last
    return max(min(made for made, _ in task.inputs), 0), task.ready - 1
