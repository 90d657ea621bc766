"""What runs on which stream, in which order, and when memory is freed: a GPU's choreography, recorded on the CPU."""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from quantised_all_gather import gather_quantised
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard
from fsdp_compiled.passes import ir
from tests.graphs import record, target_name
from tests.ranks import on_ranks, same_on_ranks
from tests.streams import RecordingStreams, recording
from tests.training import (
    MLP,
    assert_close,
    assert_sizes_may_vary,
    assert_trains_like_one_process,
    batches,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)

UNIT = SchedulePolicy(bucket="unit", prefetch=1)
GATHER_MARK = "(a gather)"
GATHER = """gathers: waits for compute
    gathers: copy in shards
    gathers: all-gather
    gathers: wait
    gathers: copy out gathered"""


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
    lines = [line.strip() for line in want.replace(GATHER_MARK, GATHER).splitlines() if line.strip()]
    assert got.splitlines() == lines, "\n" + got


@on_ranks(2)
def test_a_forward_gathers_the_next_unit_beside_the_compute_of_this_one():
    model, x = _two_layers(), my_part(batches(1, 8, 6)[0])

    def run(found: RecordingStreams) -> None:
        model(x)  # learns the order
        found.log.clear()
        model(x)

    log = """
        (a gather)
        compute: waits for gathers
        (a gather)
        compute: compute
        compute: waits for gathers
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
        (a gather)
        compute: waits for gathers
        (a gather)
        compute: compute
        compute: compute
        compute: copy in gradients
        scatters: waits for compute
        scatters: reduce-scatter
        scatters: wait
        compute: waits for gathers
        compute: compute
        compute: waits for scatters
        compute: reduce-scatter input freed
        compute: copy in gradients
        scatters: waits for compute
        scatters: reduce-scatter
        scatters: wait
        compute: waits for scatters
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
        compute: copy in gradients
        scatters: waits for compute
        scatters: reduce-scatter
        scatters: wait
        replicas: waits for compute
        replicas: waits for scatters
        replicas: all-reduce
        replicas: wait
        replicas: copy out reduced
        compute: waits for replicas
        compute: reduce-scatter input freed
        """
    _assert_log(_recorded(run), log)


@on_ranks(2)
def test_one_parameter_is_gathered_in_place():
    model = fully_shard(nn.Linear(6, 6, bias=False))

    def run(found: RecordingStreams) -> None:
        model(my_part(batches(1, 8, 6)[0]))

    log = """
        gathers: waits for compute
        gathers: all-gather
        gathers: wait
        compute: waits for gathers
        compute: compute
        """
    _assert_log(_recorded(run), log)


def _large() -> MLP:
    """Return a model whose block is cheaper to gather in six pieces than to copy; some of them are uneven."""
    return MLP(width=256, hidden=513, layers=1)


INTO_PLACE = """
    gathers: waits for compute
    gathers: all-gathers into place
    gathers: wait
    """


@on_ranks(2)
def test_large_parameters_are_gathered_each_into_place():
    model = fully_shard(_large().blocks[0])

    def run(found: RecordingStreams) -> None:
        model(torch.ones(2, 256))
        found.log.remove("compute: waits for gathers")
        del found.log[3:]

    _assert_log(_recorded(run), INTO_PLACE)
    cast = fully_shard(_large().blocks[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))

    def run_cast(found: RecordingStreams) -> None:
        cast(torch.ones(2, 256))
        del found.log[4:]

    _assert_log(_recorded(run_cast), INTO_PLACE.replace("compute\n", "compute\n    gathers: copy in shards\n"))


@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float64)])
@on_ranks(2)
def test_large_parameters_train_like_one_process(mode, policy):
    with _graphs_for_a_gpu():
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
        compute: copy in gradients
        scatters: waits for compute
        scatters: reduce-scatter
        scatters: wait
        scatters: to the host
        compute: waits for scatters
        compute: reduce-scatter input freed
        """
    _assert_log(_recorded(run), 2 * reduction + 2 * "compute: host waits for scatters\n")


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
        assert "scatters: reduce-scatter" in found.log
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
            assert part._fsdp_params["weight"]._unsharded._flat.untyped_storage().nbytes() == 0

    _recorded(run)


@contextmanager
def _graphs_for_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ir, "has_streams", lambda node: True)
        yield


@pytest.mark.parametrize("inductor", [False, True])
@on_ranks(2)
def test_graphs_take_the_copies_off_the_compute_stream(inductor):
    with _graphs_for_a_gpu():
        alone, model = MLP(hidden=9), MLP(hidden=9)
        call = shard(model, "full", inductor=inductor)
        assert_trains_like_one_process(model, call, alone)


@on_ranks(2)
def test_graphs_for_a_gpu_of_sizes_that_vary():
    with _graphs_for_a_gpu():
        alone, model = MLP(hidden=9), MLP(hidden=9)
        assert_sizes_may_vary(model, shard(model, "full"), alone)


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_graphs_move_gradients_to_the_host_beside_compute(inductor, bias_dtype):
    with _graphs_for_a_gpu():
        alone, model = MLP(hidden=9), MLP(hidden=9)
        for block in model.blocks:
            block[0].bias = nn.Parameter(block[0].bias.detach().to(bias_dtype))
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        call = shard(model, "full", inductor=inductor, offload_policy=OFFLOAD, mp_policy=policy)
        data = batches(3, 8, 10)
        want, got = train(alone, alone, data, square_loss, sharded=False), train(model, call, data, square_loss)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
        assert model.blocks[0][0].bias.dtype == bias_dtype
        assert_close({name: whole.float() for name, whole in full_params(model).items()}, full_params(alone))


@on_ranks(2)
def test_a_graph_lets_the_host_wait_last():
    with _graphs_for_a_gpu(), pytest.MonkeyPatch.context() as patch:
        call, recorder = record(_two_layers(offload_policy=OFFLOAD), UNIT, code=True)
        loss = call(my_part(batches(1, 8, 6)[0])).sum()
        with recording(patch, compute=False) as found:
            loss.backward()
        same_on_ranks(found.log)
        assert [line for line in found.log if "host" in line] == [
            *(2 * ["to host: waits for compute", "to host: to the host", "compute: lends to host 32 elements"]),
            *(2 * ["compute: host waits for to host"]),
        ]
    steps = ("mm", "reduce_scatter_tensor", "send_to_host", "wait_tensor")
    backward = [name for node in recorder.only("backward", after=True).nodes if (name := target_name(node)) in steps]
    assert backward[-2:] == ["wait_tensor", "wait_tensor"]
    assert backward.count("send_to_host") == backward.count("reduce_scatter_tensor") == 2


@on_ranks(1)
def test_the_host_waits_last_where_nothing_is_communicated():
    with _graphs_for_a_gpu():
        call, recorder = record(_two_layers(offload_policy=OFFLOAD), UNIT)
        call(torch.ones(2, 6)).sum().backward()
    steps = ("mm", "send_to_host", "wait_tensor")  # of four parameters
    backward = [name for node in recorder.only("backward", after=True).nodes if (name := target_name(node)) in steps]
    assert backward[-4:] == 4 * ["wait_tensor"]
    assert sorted(backward[:-4]) == [*(3 * ["mm"]), *(4 * ["send_to_host"])]
    assert backward[:-4] != sorted(backward[:-4])  # each when it is there


@pytest.mark.parametrize("inductor", [False, True])
@on_ranks(4)
def test_graphs_copy_in_what_they_have_computed_before_they_leave_compute(inductor):
    with _graphs_for_a_gpu(), pytest.MonkeyPatch.context() as patch:
        alone, model = MLP(hidden=9), MLP(hidden=9)
        call = shard(model, "full", inductor=inductor, reshard_after_forward=2)
        with recording(patch, compute=False) as found:
            assert_trains_like_one_process(model, call, alone)
            found.log.clear()
            loss = square_loss(call, my_part(batches(1, 8, 10)[0]))
            assert "compute: copy in shards" not in found.log
            found.log.clear()
            loss.backward()
        start = found.log.index("compute: copy in shards")
        assert found.log[start + 1].startswith("compute: lends gathers")
        assert found.log[start + 2 : start + 5] == _launch("all-gather", "copy out gathered")
        assert "gathers: copy in shards" not in found.log


@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
@on_ranks(2)
def test_a_quantised_gather_leaves_compute(wire):
    def losses_and_gradients() -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        gather_quantised(model, wire)
        call, recorder = record(fully_shard(model))
        loss = square_loss(call, my_part(batches(1, 8, 6)[0]))
        loss.backward()
        moved.append(sum(ir.leaves_compute(node) for node in recorder.only("forward", after=True).nodes))
        return [loss, *(param.grad.to_local() for param in model.parameters())]

    moved = list[int]()
    want = losses_and_gradients()
    with _graphs_for_a_gpu(), pytest.MonkeyPatch.context() as patch, recording(patch, compute=False):
        got = losses_and_gradients()
    assert all(map(torch.equal, got, want))
    assert moved[0] == 0 < moved[1]


@on_ranks(2)
def test_graphs_of_parameters_sharded_along_their_last_dimension():
    with _graphs_for_a_gpu():
        alone, model = MLP(), MLP()
        call = shard(model, "full", shard_placement_fn=lambda param: Shard(param.ndim - 1))
        assert_trains_like_one_process(model, call, alone)


@on_ranks(2)
def test_both_kinds_of_graphs_agree_bit_by_bit():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def losses_and_gradients() -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = MLP(hidden=9)
        loss = square_loss(shard(model, "full", mp_policy=policy), my_part(batches(1, 8, 10)[0]))
        loss.backward()
        return [loss, *(param.grad.to_local() for param in model.parameters())]

    want = losses_and_gradients()
    with _graphs_for_a_gpu():
        got = losses_and_gradients()
    assert all(map(torch.equal, got, want))


WAIT = "compute: waits for gathers"


def _launch(*steps: str) -> list[str]:
    return [f"gathers: {step}" for step in ("waits for compute", *steps)]


@on_ranks(2)
def test_small_odd_parameters_travel_last():
    with _graphs_for_a_gpu():
        model = fully_shard(nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 16)))
        call, recorder = record(model, UNIT)
        call(torch.ones(2, 16)).sum().backward()
    gathered, reduced = (
        next(bundle for node in recorder.only(kind, after=True).nodes if (bundle := ir.bundle_of(node)))
        for kind in ("forward", "backward")
    )
    assert reduced.reduces and not gathered.reduces
    for bundle in (gathered, reduced):  # each rank has 48, 8, 40 and 3 elements of these
        first, *between, last = bundle.params
        assert (first, sorted(between), last) == ("0.weight", ["1.bias", "1.weight"], "0.bias")


@on_ranks(2)
def test_cuda_graphs_are_refused():
    with _graphs_for_a_gpu(), config.patch("triton.cudagraphs", True):
        call = shard(MLP(), "full", inductor=True)
        with pytest.raises(Exception, match="CUDA graphs .* cannot hold collectives that other streams run"):
            call(torch.ones(2, 10))


@on_ranks(2)
def test_a_graph_gathers_large_parameters_into_place():
    with _graphs_for_a_gpu(), pytest.MonkeyPatch.context() as patch:
        call, recorder = record(fully_shard(_large().blocks[0]), UNIT)
        call(torch.ones(2, 256))
        with recording(patch, compute=False) as found:
            call(torch.ones(2, 256))
        assert found.log == [*_launch("all-gathers into place"), WAIT]
    (launch,) = [node for node in recorder.only("forward", after=True).nodes if ir.leaves_compute(node)]
    assert ir.bundle_of(launch).is_in_place


@on_ranks(2)
def test_what_a_graph_runs_where():
    with _graphs_for_a_gpu(), pytest.MonkeyPatch.context() as patch:
        model, x = _two_layers(), my_part(batches(1, 8, 6)[0])
        call, recorder = record(model, UNIT, code=True)
        call(x).sum().backward()
        with recording(patch, compute=False) as found:
            call(x)
        same_on_ranks(found.log)
        launch = _launch("copy in shards", "all-gather", "copy out gathered")
        assert found.log == [*launch, *launch, WAIT, WAIT]
    forward, backward = ([target_name(node) for node in graph.nodes] for _, graph in recorder.after)
    steps = ("launch_gather", "wait_tensor", "addmm", "copy_in_gradients", "reduce_scatter_tensor", "mm")
    assert [name for name in forward if name in steps] == [
        *("launch_gather", "launch_gather", "wait_tensor", "addmm", "wait_tensor", "addmm"),
    ]
    assert "all_gather_into_tensor" not in forward + backward
    reduced = [name for name in backward if name in ("copy_in_gradients", "reduce_scatter_tensor")]
    assert reduced == ["copy_in_gradients", "reduce_scatter_tensor"] * 2
