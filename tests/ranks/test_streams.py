"""What runs on which stream, in which order, and when memory is freed: a GPU's choreography, recorded on the CPU."""

from collections.abc import Callable

import pytest
import torch
from quantised_all_gather import gather_quantised
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard, step_on_shards
from fsdp_compiled.passes import Schedule
from fsdp_compiled.passes.graph import nodes
from tests.support.builder import Builder, spec
from tests.support.graphs import record, target_name
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.streams import RecordingStreams, recording
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    batches,
    compiled,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough

UNIT = SchedulePolicy(bucket="unit", prefetch=1)
ALL_GATHER_MARK = "(an all-gather)"
ALL_GATHER = """all-gathers: waits for compute
    all-gathers: pack shards
    all-gathers: all-gather
    all-gathers: wait
    all-gathers: unpack parameters"""


def _two_layers_alone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def _two_layers(**kwargs) -> nn.Module:
    model = _two_layers_alone()
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _recorded(run: Callable[[RecordingStreams], None]) -> str:
    with pytest.MonkeyPatch.context() as patch, recording(patch) as found:
        run(found)
        log = list(found.log)
    same_on_ranks(log)
    return "\n".join(log)


def _assert_log(got: str, want: str) -> None:
    lines = [line.strip() for line in want.replace(ALL_GATHER_MARK, ALL_GATHER).splitlines() if line.strip()]
    assert got.splitlines() == lines, "\n" + got


@on_ranks(2)
def test_a_forward_gathers_the_next_unit_beside_the_compute_of_this_one():
    model, x = _two_layers(), my_part(batches(1, 8, 6)[0])

    def run(found: RecordingStreams) -> None:
        model(x)  # learns the order
        found.log.clear()
        model(x)

    log = """
        (an all-gather)
        compute: waits for all-gathers
        (an all-gather)
        compute: compute
        compute: waits for all-gathers
        compute: compute
        """
    _assert_log(_recorded(run), log)


@on_ranks(2)
def test_a_backward_gathers_ahead_and_reduces_beside_compute():
    model, x = _two_layers(), my_part(batches(1, 8, 6)[0])

    def run(found: RecordingStreams) -> None:
        loss = square_loss(model, x)
        found.log.clear()
        loss.backward()

    log = """
        (an all-gather)
        compute: waits for all-gathers
        (an all-gather)
        compute: compute
        compute: compute
        compute: pack gradients
        reduce-scatters: waits for compute
        reduce-scatters: reduce-scatter
        reduce-scatters: wait
        compute: waits for all-gathers
        compute: compute
        compute: waits for reduce-scatters
        compute: reduce-scatter input freed
        compute: pack gradients
        reduce-scatters: waits for compute
        reduce-scatters: reduce-scatter
        reduce-scatters: wait
        compute: waits for reduce-scatters
        compute: reduce-scatter input freed
        """
    _assert_log(_recorded(run), log)


@on_ranks(4)
def test_replicas_are_reduced_on_a_stream_of_their_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model = fully_shard(nn.Linear(6, 6), mesh=mesh, mp_policy=policy)

    def run(found: RecordingStreams) -> None:
        loss = square_loss(model, my_part(batches(1, 8, 6)[0]))
        found.log.clear()
        loss.backward()

    log = """
        compute: compute
        compute: pack gradients
        reduce-scatters: waits for compute
        reduce-scatters: reduce-scatter
        reduce-scatters: wait
        all-reduces: waits for compute
        all-reduces: waits for reduce-scatters
        all-reduces: all-reduce
        all-reduces: wait
        all-reduces: unpack gradients
        compute: waits for all-reduces
        compute: reduce-scatter input freed
        """
    _assert_log(_recorded(run), log)


@on_ranks(2)
def test_one_parameter_is_gathered_in_place():
    model = fully_shard(nn.Linear(6, 6, bias=False))

    def run(found: RecordingStreams) -> None:
        model(my_part(batches(1, 8, 6)[0]))

    log = """
        all-gathers: waits for compute
        all-gathers: all-gather
        all-gathers: wait
        compute: waits for all-gathers
        compute: compute
        """
    _assert_log(_recorded(run), log)


def _large() -> MLP:
    """Return a model whose block is cheaper to gather in six pieces than to copy; some of them are uneven."""
    return MLP(width=256, hidden=513, layers=1)


INTO_PLACE = """
    all-gathers: waits for compute
    all-gathers: all-gathers into place
    all-gathers: wait
    """


@on_ranks(2)
def test_large_parameters_are_gathered_each_into_place():
    model = fully_shard(_large().blocks[0])

    def run(found: RecordingStreams) -> None:
        model(torch.ones(2, 256))
        found.log.remove("compute: waits for all-gathers")
        del found.log[3:]

    _assert_log(_recorded(run), INTO_PLACE)
    cast = fully_shard(_large().blocks[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))

    def run_cast(found: RecordingStreams) -> None:
        cast(torch.ones(2, 256))
        del found.log[4:]

    _assert_log(_recorded(run_cast), INTO_PLACE.replace("compute\n", "compute\n    all-gathers: pack shards\n"))


@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float64)])
@on_ranks(2)
def test_large_parameters_train_like_one_process(mode, policy):
    alone, model = _large(), _large()
    call = shard(model, mode, mp_policy=policy)
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 256))


OFFLOAD = CPUOffloadPolicy(pin_memory=False)


@on_ranks(2)
def test_the_host_waits_at_the_end_for_gradients_that_go_to_it():
    model = _two_layers(offload_policy=OFFLOAD)

    def run(found: RecordingStreams) -> None:
        loss = square_loss(model, my_part(batches(1, 8, 6)[0]))
        found.log.clear()
        loss.backward()
        found.log[:] = [line for line in found.log if "gather" not in line and "compute: compute" not in line]

    reduction = """
        compute: pack gradients
        reduce-scatters: waits for compute
        reduce-scatters: reduce-scatter
        reduce-scatters: wait
        reduce-scatters: to the host
        compute: waits for reduce-scatters
        compute: reduce-scatter input freed
        """
    _assert_log(_recorded(run), 2 * reduction + 2 * "compute: host waits for reduce-scatters\n")


@pytest.mark.parametrize("manually", [False, True])
@on_ranks(2)
def test_gradients_land_on_the_host_after_every_backward(manually):
    alone, model = _two_layers_alone(), _two_layers(offload_policy=OFFLOAD)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.add_(param.grad, alpha=0.0))

    def run(found: RecordingStreams) -> None:
        model.set_is_last_backward(False)
        model.set_manual_backward_finalization(manually)
        data = batches(3, 8, 6)
        for batch in data[:2]:
            square_loss(model, my_part(batch)).backward()
        assert all(param.grad is not None for param in model[1].parameters())
        model.set_is_last_backward(True)
        square_loss(model, my_part(data[2])).backward()
        if manually:
            model.finalize_backward(async_op=True).wait()
        for batch in data:
            square_loss(alone, batch).backward()
        assert_close(full_grads(model), full_grads(alone))

    _recorded(run)


@on_ranks(2)
def test_gradients_of_a_backward_that_failed_land_nowhere():
    alone, model = _two_layers_alone(), _two_layers(offload_policy=OFFLOAD)
    data = my_part(batches(1, 8, 6)[0])

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    def run(found: RecordingStreams) -> None:
        x = data.clone().requires_grad_()
        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="in backward"):
            square_loss(model, x).backward()
        model.reset_iter_state()
        assert all(param.grad is None for param in model.parameters())
        assert_trains_like_one_process(model, model, alone, batches(2, 8, 6))

    _recorded(run)


@on_ranks(4)
def test_gradients_not_reduced_over_replicas_stay_on_the_device():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(6, 6), mesh=mesh, offload_policy=OFFLOAD)
    model.set_requires_all_reduce(False)

    def run(found: RecordingStreams) -> None:
        square_loss(model, my_part(batches(1, 8, 6)[0])).backward()
        assert "reduce-scatters: reduce-scatter" in found.log
        assert not any("host" in line for line in found.log)

    _recorded(run)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.parts[index](x).relu()
        return x


@on_ranks(2)
def test_a_forward_in_another_order_uses_what_it_gathers():
    torch.manual_seed(0)
    alone = _Branches()
    torch.manual_seed(0)
    model = _Branches()
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)

    def run(found: RecordingStreams) -> None:
        for order in ([0, 1, 2, 3], [0, 2, 1], [3], [0, 1, 1, 2], [0, 1, 1, 2]):
            alone.order = model.order = order
            assert_trains_like_one_process(model, model, alone, batches(2, 8, 6))
        for part in model.parts:
            assert part._fsdp_params["weight"].unsharded.param.untyped_storage().nbytes() == 0

    _recorded(run)


# ---- graphs ----

HALVES = ("launch_all_gather", "wait_all_gather", "launch_reduce_scatter", "wait_reduce_scatter")
TO_HOST = ("launch_copy_to_host", "wait_copy_to_host")
WAIT = "compute: waits for all-gathers"


def _launch(*steps: str) -> list[str]:
    return [f"all-gathers: {step}" for step in ("waits for compute", *steps)]


def _steps(graph, *names: str) -> list[str]:
    return [name for node in graph.nodes if (name := target_name(node)) in names]


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
@thorough(when=lambda inductor, bias_dtype: inductor and bias_dtype == torch.float64)
@on_ranks(2)
def test_graphs_copy_gradients_to_the_host(inductor, bias_dtype):
    alone, model = MLP(hidden=9), MLP(hidden=9)
    for block in model.blocks:
        block[0].bias = nn.Parameter(block[0].bias.detach().to(bias_dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    call = shard(model, "full", inductor=inductor, offload_policy=OFFLOAD, mp_policy=policy)
    data = batches(3, 8, 10)
    want, got = train(alone, alone, data, square_loss, sharded=False), train(model, call, data, square_loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert model.blocks[0][0].bias.dtype == bias_dtype
    assert_close({name: param.float() for name, param in full_params(model).items()}, full_params(alone))


@on_ranks(2)
def test_a_graph_lets_the_host_wait_last():
    with pytest.MonkeyPatch.context() as patch:
        call, recorder = record(_two_layers(offload_policy=OFFLOAD), UNIT, code=True)
        loss = call(my_part(batches(1, 8, 6)[0])).sum()
        with recording(patch, compute=False) as found:
            loss.backward()
        same_on_ranks(found.log)
        assert [line for line in found.log if "host" in line] == [
            *(2 * ["to host: waits for compute", "to host: to the host"]),
            *(2 * ["compute: waits for to host", "compute: host waits for to host"]),
        ]
    backward = _steps(recorder.only("backward", after=True), "mm", "launch_reduce_scatter", *TO_HOST)
    assert backward[-2:] == 2 * ["wait_copy_to_host"]
    assert backward.count("launch_copy_to_host") == backward.count("launch_reduce_scatter") == 2


@on_ranks(1)
def test_the_host_waits_last_where_nothing_is_communicated():
    call, recorder = record(_two_layers(offload_policy=OFFLOAD), SchedulePolicy(bucket="none"))
    call(torch.ones(2, 6)).sum().backward()
    backward = _steps(recorder.only("backward", after=True), "mm", *TO_HOST)
    assert backward[-4:] == 4 * ["wait_copy_to_host"]
    assert sorted(backward[:-4]) == [*(4 * ["launch_copy_to_host"]), *(3 * ["mm"])]


@pytest.mark.parametrize("inductor", [False, True])
@thorough(when=lambda inductor: not inductor)
@on_ranks(4)
def test_graphs_pack_what_they_have_computed_on_the_compute_stream(inductor):
    with pytest.MonkeyPatch.context() as patch:
        alone, model = MLP(hidden=9), MLP(hidden=9)
        call = shard(model, "full", inductor=inductor, reshard_after_forward=2)
        with recording(patch, compute=False) as found:
            assert_trains_like_one_process(model, call, alone)
            found.log.clear()
            loss = square_loss(call, my_part(batches(1, 8, 10)[0]))
            assert "compute: pack shards" not in found.log
            found.log.clear()
            loss.backward()
        start = found.log.index("compute: pack shards")
        assert found.log[start + 1] == "all-gathers: waits for compute"


@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
@on_ranks(2)
def test_a_quantised_all_gather_leaves_compute(wire):
    def losses_and_gradients() -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        gather_quantised(model, wire)
        call, _ = record(fully_shard(model))
        loss = square_loss(call, my_part(batches(1, 8, 6)[0]))
        loss.backward()
        return [loss, *(param.grad.to_local() for param in model.parameters())]

    want = losses_and_gradients()
    with pytest.MonkeyPatch.context() as patch, recording(patch, compute=False) as found:
        got = losses_and_gradients()
    assert all(map(torch.equal, got, want))
    assert "all-gathers: all-gather" in found.log and "compute: all-gather" not in found.log


@on_ranks(2)
def test_an_exception_between_launch_and_wait_leaves_nothing_behind():
    with pytest.MonkeyPatch.context() as patch:
        model = _two_layers()
        call, recorder = record(model, UNIT)
        call(my_part(batches(1, 8, 6)[0]))
        with recording(patch, compute=False) as found:
            bucket = next(
                nodes.bucket_of(n) for n in recorder.only("forward", after=True).nodes if nodes.is_launch(n)
            )
            shards = [p._fsdp_params[name].storage.padded for p in [model[0]] for name in ("weight", "bias")]
            handle = torch.ops.fsdp_compiled.launch_all_gather(shards, bucket.encode())
            found.log.clear()
            del handle
            assert found.log == [WAIT]  # before memory that the side stream still uses is free for compute


@on_ranks(2)
def test_cuda_graphs_are_refused():
    b = Builder(Schedule(SchedulePolicy(bucket="none")))
    unsharded = b.unshard(b.input("primals_1", 2, device="cuda"), spec((4,), "w", world=2))
    with config.patch("triton.cudagraphs", True), pytest.raises(NotImplementedError, match="CUDA graphs .* cannot"):
        b.text(unsharded)


@on_ranks(2)
def test_wrappers_in_cpp_are_refused():
    call = compiled(shard(MLP(), "eager"), inductor=True)
    with config.patch("cpp_wrapper", True), pytest.raises(Exception, match="cpp_wrapper .* cannot call collectives"):
        call(torch.ones(2, 10))


@on_ranks(2)
def test_a_graph_gathers_large_parameters_into_place():
    with pytest.MonkeyPatch.context() as patch:
        call, recorder = record(fully_shard(_large().blocks[0]), UNIT)
        call(torch.ones(2, 256))
        with recording(patch, compute=False) as found:
            call(torch.ones(2, 256))
        assert found.log == [*_launch("all-gathers into place", "wait"), WAIT]
    (launch,) = [node for node in recorder.only("forward", after=True).nodes if nodes.is_launch(node)]
    assert nodes.bucket_of(launch).into_place


@on_ranks(2)
def test_what_a_graph_runs_where():
    with pytest.MonkeyPatch.context() as patch:
        model, x = _two_layers(), my_part(batches(1, 8, 6)[0])
        call, recorder = record(model, UNIT, code=True)
        call(x).sum().backward()
        with recording(patch, compute=False) as found:
            loss = call(x).sum()
            forward, found.log[:] = list(found.log), []
            loss.backward()
            backward = list(found.log)
        same_on_ranks(forward + backward)
    launch = _launch("pack shards", "all-gather", "wait", "unpack parameters")
    assert forward == [*launch, *launch, WAIT, WAIT]
    reduction = [
        "compute: pack gradients",
        *(f"reduce-scatters: {s}" for s in ("waits for compute", "reduce-scatter", "wait")),
    ]
    freed = "compute: reduce-scatter input freed"
    done = ["compute: waits for reduce-scatters", freed]
    assert [line for line in backward if "all-gather" not in line] == [*reduction, *reduction, *done, *done]
    graphs = [_steps(graph, *HALVES, "addmm", "mm") for _, graph in recorder.after]
    gather, wait = HALVES[:2]
    assert graphs[0] == [gather, gather, wait, "addmm", wait, "addmm"]
    assert [name for name in graphs[1] if name in HALVES[2:]] == [*(2 * [HALVES[2]]), *(2 * [HALVES[3]])]


@on_ranks(4)
def test_a_graph_reduces_replicas_on_a_stream_of_their_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.MonkeyPatch.context() as patch:
        call, _ = record(fully_shard(nn.Linear(6, 6), mesh=mesh), UNIT)
        loss = call(my_part(batches(1, 8, 6)[0])).sum()
        with recording(patch, compute=False) as found:
            loss.backward()
    log = """
        compute: pack gradients
        reduce-scatters: waits for compute
        reduce-scatters: reduce-scatter
        reduce-scatters: wait
        compute: waits for reduce-scatters
        compute: reduce-scatter input freed
        all-reduces: waits for compute
        all-reduces: all-reduce
        all-reduces: wait
        compute: waits for all-reduces
        """
    _assert_log("\n".join(found.log), log)


@on_ranks(2)
def test_matrices_travel_on_a_stream_of_their_own():
    said = []

    def newton_schulz(matrix, *settings):
        said[0].say("compute a matrix")
        return matrix

    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = step_on_shards(torch.optim.Muon(params), newton_schulz=newton_schulz)

    def run(found: RecordingStreams) -> None:
        said.append(found)
        optimizer.step()

    exchange = """all-to-alls: waits for compute
        all-to-alls: all-to-all
        all-to-alls: wait"""
    log = f"""
        {exchange}
        compute: waits for all-to-alls
        {exchange}
        compute: compute a matrix
        {exchange}
        compute: waits for all-to-alls
        compute: compute a matrix
        {exchange}
        compute: waits for all-to-alls
        compute: waits for all-to-alls
        """
    _assert_log(_recorded(run), log)
