"""Where launches and waits are put, on plain records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compiled.passes.planning import placing, tasks
from fsdp_compiled.passes.planning.tasks import Load, Stage, Task


def gather(size, us, first, last, earliest=0, kept=0):
    """An all-gather of ``size`` bytes, of which ``kept`` count elsewhere."""
    return Task((Stage(us),), earliest, first, last, output_bytes=size - kept)


def reduction(parts, us, needed, all_reduce_us=None, host_us=None):
    """A reduce-scatter of ``parts``, perhaps an all-reduce after it, on a lane of its own or not, and a copy."""
    stages = [Stage(us)]
    stages += [] if all_reduce_us is None else [Stage(all_reduce_us)]
    stages += [] if host_us is None else [Stage(host_us, "to the host")]
    ready = max(made for made, _ in parts) + 1
    return Task(tuple(stages), ready, needed, inputs=parts, is_ahead=False)


def shown(load, bound=1000, prefetch=None):
    """The schedule as text: compute nodes as numbers, between launches (G, R, A) and waits (g, r, a).

    A is an all-reduce, H a copy to the host. Kinds are numbered apart.
    """
    actions = placing.place(load, bound, prefetch)
    numbers = {index: n for kind in (load.ahead, load.behind) for n, (index, _) in enumerate(kind)}
    words = []
    for position in range(len(load.compute_us) + 1):
        for action in (a for a in actions if a.position == position):
            task = load.tasks[action.task]
            letter = "g" if task.is_ahead else "r" if not action.stage else "a"
            letter = "h" if task.stages[action.stage].lane else letter
            words.append(f"{letter.upper() if action.verb == 'launch' else letter}{numbers[action.task]}")
        words.append(str(position) if position < len(load.compute_us) else "")
    return " ".join(words).strip()


def layers(count, size=10, us=5.0, compute_us=10.0):
    """``count`` layers of one compute node, each with a gather of its own."""
    gathers = tuple(gather(size, us, first=i, last=i) for i in range(count))
    return Load((compute_us,) * count, gathers)


def test_each_gather_is_launched_one_layer_ahead():
    assert shown(layers(4)) == "G0 G1 g0 0 G2 g1 1 G3 g2 2 g3 3"


def test_a_gather_longer_than_a_layer_is_launched_earlier():
    assert shown(layers(4, us=15.0)) == "G0 G1 G2 g0 0 G3 g1 1 g2 2 g3 3"


def test_prefetch_of_none_and_of_two():
    assert shown(layers(3), prefetch=0) == "G0 g0 0 G1 g1 1 G2 g2 2"
    assert shown(layers(4), prefetch=2) == "G0 G1 G2 g0 0 G3 g1 1 g2 2 g3 3"


def test_memory_delays_a_launch():
    assert shown(layers(3), bound=10) == "G0 g0 0 G1 g1 1 G2 g2 2"
    assert shown(layers(3), bound=19) == "G0 g0 0 G1 g1 1 G2 g2 2"
    assert shown(layers(3), bound=20) == "G0 G1 g0 0 G2 g1 1 g2 2"


def test_what_is_kept_anyway_takes_no_room():
    load = Load((10.0, 10.0), (gather(99, 5.0, 0, 1, kept=99), gather(10, 5.0, 1, 1)))
    assert shown(load, bound=10) == "G0 G1 g0 0 g1 1"


def test_a_gather_waits_for_its_input():
    load = Load((10.0,) * 3, (gather(10, 5.0, first=2, last=2, earliest=1),))
    assert shown(load) == "0 G0 1 g0 2"


def test_reductions_are_launched_when_ready_and_waited_for_at_the_end():
    reductions = tuple(reduction(((i, 10),), 5.0, needed=3) for i in range(3))
    load = Load((10.0,) * 3, reductions)
    assert shown(load) == "0 R0 1 R1 2 R2 r0 r1 r2"
    assert shown(load, bound=20) == "0 R0 1 R1 r0 2 R2 r1 r2"
    assert shown(load, bound=10) == "0 R0 r0 1 R1 r1 2 R2 r2"


def test_a_gather_takes_the_memory_of_the_oldest_reduction():
    gathers = (gather(10, 5.0, 0, 0), gather(20, 5.0, 2, 2))
    load = Load((10.0,) * 3, (*gathers, reduction(((0, 10),), 50.0, needed=3)))
    assert shown(load, bound=20) == "G0 g0 0 R0 1 r0 G1 g1 2"


def test_a_reduction_is_finished_before_its_result_is_read():
    load = Load((10.0,) * 3, (reduction(((0, 10),), 5.0, needed=2, all_reduce_us=3.0),))
    assert shown(load) == "0 R0 1 r0 A0 a0 2"


def test_an_all_reduce_follows_when_its_reduce_scatter_must_be_done():
    reductions = tuple(reduction(((i, 10),), 5.0, needed=4, all_reduce_us=3.0) for i in range(4))
    load = Load((10.0,) * 4, reductions)
    assert shown(load) == "0 R0 1 R1 r0 A0 2 R2 r1 A1 3 R3 r2 A2 r3 A3 a0 a1 a2 a3"


def test_what_moves_to_the_host_is_waited_for_when_it_must_be_there():
    reductions = tuple(reduction(((i, 10),), 5.0, needed=4, host_us=1.0) for i in range(4))
    assert shown(Load((10.0,) * 4, reductions)) == "0 R0 1 R1 r0 H0 2 R2 r1 H1 3 R3 r2 H2 r3 H3 h0 h1 h2 h3"
    reductions = tuple(reduction(((i, 10),), 5.0, needed=4, all_reduce_us=3.0, host_us=1.0) for i in range(4))
    shown_load = shown(Load((10.0,) * 4, reductions))
    assert shown_load == "0 R0 1 R1 r0 A0 2 R2 r1 A1 a0 H0 3 R3 r2 A2 a1 H1 r3 A3 a2 H2 a3 H3 h0 h1 h2 h3"


def test_the_timeline_of_hidden_and_exposed_collectives():
    load = layers(3, us=15.0)
    timeline = tasks.simulate(load, placing.place(load, 1000, 1))
    exposed = [timeline.operations[i, 0].exposed_us for i in range(3)]
    # 0: nothing before it. 1: launched with 0, after it on the link. 2: launched with the first layer.
    assert exposed == [15.0, 5.0, 5.0]
    assert timeline.total_us == 15 + 10 + 5 + 10 + 5 + 10
    assert timeline.compute == ((0, 15.0, 25.0), (1, 30.0, 40.0), (2, 45.0, 55.0))


def test_the_host_waits_at_the_end_for_gradients_that_queue_on_their_way():
    reductions = tuple(reduction(((i, 10),), 5.0, needed=3, host_us=20.0) for i in range(3))
    load = Load((10.0,) * 3, reductions)
    assert shown(load) == "0 R0 1 R1 r0 H0 2 R2 r1 H1 r2 H2 h0 h1 h2"
    timeline = tasks.simulate(load, placing.place(load, 1000))
    # Done on the link at 15, 25 and 35, waited for at 20, 30 and 35; the ways to the host end at 40, 60 and 80.
    assert [timeline.operations[i, 0].exposed_us for i in range(3)] == [0.0, 0.0, 5.0]
    assert sum(timeline.operations[i, 1].exposed_us for i in range(3)) == 45.0
    assert timeline.total_us == 80.0


def test_where_compute_and_collectives_share_cores_nothing_hides():
    load = layers(3, us=4.0)
    blocked = tuple(replace(task, stages=(Stage(4.0, blocked_us=4.0),)) for task in load.tasks)
    load = replace(load, tasks=blocked)
    timeline = tasks.simulate(load, placing.place(load, 1000))
    assert timeline.total_us == 3 * (10 + 4)
    assert {timed.exposed_us for timed in timeline.operations.values()} == {4.0}


@st.composite
def loads(draw):
    """Chains of compute with gathers and reductions anywhere, long-lived ones among them."""
    count = draw(st.integers(1, 12))
    place = st.integers(0, count - 1)
    gathers = []
    for _ in range(draw(st.integers(0, 8))):
        first = draw(place)
        last = draw(st.integers(first, count - 1))
        earliest = draw(st.integers(0, first))
        us = draw(st.floats(0, 30))
        size = draw(st.integers(0, 50))
        gathers.append(gather(size, us, first, last, earliest, draw(st.sampled_from([0, size]))))
    reductions = []
    for _ in range(draw(st.integers(0, 8))):
        parts = tuple(
            (draw(st.integers(-1, count - 1)), draw(st.integers(0, 50))) for _ in range(draw(st.integers(1, 3)))
        )
        ready = max(made for made, _ in parts) + 1
        all_reduce_us = draw(st.sampled_from([None, 0.0, 7.0]))
        needed = draw(st.integers(ready, count))
        host_us = draw(st.sampled_from([None, 0.0, 9.0]))
        us = draw(st.floats(0, 30))
        reductions.append(reduction(parts, us, needed, all_reduce_us=all_reduce_us, host_us=host_us))
    compute_us = tuple(draw(st.lists(st.floats(0, 20), min_size=count, max_size=count)))
    blocked = draw(st.sampled_from([0.0, 0.3, 1.0]))
    drawn = (
        replace(t, stages=tuple(s._replace(blocked_us=s.us * blocked) for s in t.stages))
        for t in (*gathers, *reductions)
    )
    return Load(compute_us, tuple(drawn))


@given(loads(), st.sampled_from([0, 1, 3]), st.floats(0.1, 10))
def test_with_a_given_prefetch_and_room_the_order_of_launches_follows_from_no_estimate(load, prefetch, slower):
    """So ranks with inputs of different sizes agree on it; all-reduces over replicas do follow from estimates."""

    def launched(us_of):
        tasks = tuple(replace(task, stages=task.stages[:1]) for task in load.tasks)
        timed = replace(load, compute_us=tuple(map(us_of, load.compute_us)), tasks=tasks)
        actions = placing.place(timed, 10**9, prefetch)
        return [(action.position, action.task) for action in actions if action.verb == "launch"]

    assert launched(lambda us: us) == launched(lambda us: slower * us + 1.0)


ROOMS, PREFETCHES = st.integers(0, 60), st.sampled_from([None, 0, 1, 3])


@given(loads(), ROOMS, PREFETCHES)
def test_any_schedule_is_legal_and_inside_its_bound(load, room, prefetch):
    check_schedule(load, room, prefetch)


def check_schedule(load, room, prefetch):
    """Every launch and wait once, in turn, where inputs exist and results are read; within the bound; repeatable."""
    bound = max(tasks.least_bytes(load)) + room
    actions = placing.place(load, bound, prefetch)
    assert actions == placing.place(load, bound, prefetch)
    assert max(bytes_by_a_walk(load, actions)) <= bound
    assert [a.position for a in actions] == sorted(a.position for a in actions)
    where = {(a.verb, a.task, a.stage): (i, a.position) for i, a in enumerate(actions)}
    assert len(where) == len(actions)
    for index, task in enumerate(load.tasks):
        launch, wait = where.pop(("launch", index, 0)), where.pop(("wait", index, 0))
        assert launch < wait
        if task.is_ahead:
            assert task.ready <= launch[1] <= wait[1] == task.needed
        else:
            assert task.ready == launch[1] <= wait[1] <= task.needed
        for stage in range(1, len(task.stages)):
            relaunch, complete = (where.pop((verb, index, stage)) for verb in ("launch", "wait"))
            assert wait < relaunch < complete
            assert complete[1] <= task.needed
            wait = complete
    assert not where
    timeline = tasks.simulate(load, actions)
    assert timeline.total_us == pytest.approx(
        sum(load.compute_us) + sum(timed.exposed_us for timed in timeline.operations.values())
    )


@given(loads())
def test_the_bytes_in_flight_are_those_of_a_walk(load):
    actions = placing.place(load, max(tasks.least_bytes(load)) + 20)
    assert bytes_by_a_walk(load, actions) == tasks.bytes_in_flight(load, actions)


def bytes_by_a_walk(load, actions):
    """Count anew, for each position: what is launched or made, and not yet read for the last time or reduced."""
    alive, curve = {}, []
    for index, task in load.behind:
        for part, (made, size) in enumerate(task.inputs):
            if made == -1:
                alive[index, part] = size
    for position in range(len(load.compute_us) + 1):
        for index, task in load.ahead:
            if task.last < position:
                alive.pop(index, None)
        for action in (a for a in actions if a.position == position and not a.stage):
            task = load.tasks[action.task]
            if task.is_ahead and action.verb == "launch":
                alive[action.task] = task.output_bytes
            if not task.is_ahead and action.verb == "wait":
                for part in range(len(task.inputs)):
                    alive.pop((action.task, part))
        for index, task in load.behind:
            for part, (made, size) in enumerate(task.inputs):
                if made == position:
                    alive[index, part] = size
        curve.append(sum(alive.values()))
    return curve
