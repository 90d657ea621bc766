"""What a schedule places: tasks in a graph's compute, actions on them, and the memory and time that they take.

A task is a bucket of requests as the schedule sees it. Positions count compute nodes; "at position p" means before
compute node p runs, and the position after the last one is the end of the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ..cost import Cluster
from ..kinds import Request

Members = tuple[Request, ...]  # of a bucket: requests of one kind that share a collective


class Stage(NamedTuple):
    """One operation of a task."""

    us: float  # time on the lane
    lane: str = ""  # operations on one lane run one after the other
    blocked_us: float = 0.0  # of ``us``, while compute cannot run

    @property
    def hideable_us(self) -> float:
        return self.us - self.blocked_us


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

    @cached_property
    def input_bytes(self) -> int:
        return sum(size for _, size in self.inputs)


def _task_of(cluster: Cluster, bucket: Members) -> Task:
    first, times = bucket[0], bucket[0].kind.times(bucket, cluster)
    return Task(
        tuple(
            Stage(us, lane.name, lane.blocked_us(us)) for us, lane in zip(times.stages_us, first.lanes, strict=True)
        ),
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

    @property
    def end(self) -> int:
        """The position after the last compute node."""
        return len(self.compute_us)

    @cached_property
    def clock(self) -> list[float]:
        """When each position is reached by compute alone, microseconds."""
        return [0.0, *accumulate(self.compute_us)]

    @cached_property
    def ahead(self) -> list[tuple[int, Task]]:
        """The tasks that are started ahead of their use, each with its index."""
        return [each for each in enumerate(self.tasks) if each[1].is_ahead]

    @cached_property
    def behind(self) -> list[tuple[int, Task]]:
        """The tasks that are started as soon as their inputs exist, each with its index."""
        return [each for each in enumerate(self.tasks) if not each[1].is_ahead]


@dataclass(frozen=True)
class Requests:
    """A graph's compute and its requests, those of each kind in the order in which buckets are filled."""

    compute_us: tuple[float, ...]
    each: tuple[Request, ...]
    cluster: Cluster

    @cached_property
    def _task_of(self) -> Callable[[Members], Task]:
        return cache(partial(_task_of, self.cluster))

    def load(self, buckets: Iterable[Members]) -> Load:
        """Return what a schedule has to place for these buckets; tasks of equal buckets are made once."""
        return Load(self.compute_us, tuple(map(self._task_of, buckets)))

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
        clock = self.load(()).clock
        return Requests(tuple(clock[b] - clock[a] for a, b in pairwise(positions)), each, self.cluster), positions


def in_order(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return requests in the order in which :class:`Requests` has them."""

    def place(each: Request) -> tuple[bool, str, int, str]:
        """What starts ahead comes first. Within a position by name: the order of nodes there may differ by rank."""
        is_ahead = each.kind.is_ahead
        return not is_ahead, each.kind.noun, each.needed if is_ahead else each.ready, each.param.name

    return tuple(sorted(requests, key=place))


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
    change = [0] * (load.end + 2)
    for (_, task), start in zip(load.ahead, launched, strict=True):
        change[start] += task.output_bytes
        change[task.last + 1] -= task.output_bytes
    for (_, task), end in zip(load.behind, reduced, strict=True):
        for made, size in task.inputs:
            change[max(made, 0)] += size
        change[end] -= task.input_bytes
    return list(accumulate(change))[:-1]


@dataclass(frozen=True)
class Timed:
    """When an operation is launched and on its lane, and how long compute waits for it."""

    launched_us: float
    start_us: float
    end_us: float
    exposed_us: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    operations: dict[tuple[int, int], Timed]  # by task and stage
    compute: tuple[tuple[int, float, float], ...]  # (position, start, end) of each run of compute between two actions
    total_us: float  # when the graph ends


def simulate(load: Load, actions: Sequence[Action]) -> Timeline:
    """Return when everything happens: on one lane of compute, and those that stages name."""
    now, at, spans = 0.0, 0, []
    free, timed = dict[str, float](), dict[tuple[int, int], Timed]()
    for action in [*actions, None]:
        position = action.position if action else load.end
        if position > at:
            length = load.clock[position] - load.clock[at]
            spans.append((at, now, now + length))
            now, at = now + length, position
        if action is None:
            break
        key, task = (action.task, action.stage), load.tasks[action.task]
        if action.verb == "launch":
            now += task.pack_us if action.stage == 0 else 0.0
            stage = task.stages[action.stage]
            start = max(now, free.get(stage.lane, 0.0))
            free[stage.lane] = start + stage.us
            timed[key] = Timed(now, start, start + stage.us, stage.blocked_us)
            now += stage.blocked_us
        else:
            stall = max(0.0, timed[key].end_us - now)
            timed[key] = replace(timed[key], exposed_us=timed[key].exposed_us + stall)
            now += stall + (task.unpack_us if action.stage == 0 else 0.0)
    return Timeline(timed, tuple(spans), now)
