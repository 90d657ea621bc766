"""What is built on steps, on a GPU: ranks as processes, memory of NCCL, 8-bit products, profiles, tools."""

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_compiled
from fsdp_compiled import fully_shard, fully_shard_with_compiled_compute, stream_parameters, unsharded
from fsdp_compiled.collectives import backend, communicators
from fsdp_compiled.inspect import capture
from fsdp_compiled.testing import RankProcesses
from fsdp_compiled.testing.processes import Setting
from tests.gpu.test_steps import MODES, WIDTH, _model, _shard, _trains_like

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def _train(mode, rank):
    alone = _model()
    model = copy.deepcopy(alone)
    _trains_like(alone, model, _shard(model, mode))


def _on_processes(world, body, setting):
    ranks = RankProcesses(world)
    try:
        ranks.run(world, body, setting)  # raises what a rank's assertion says
    finally:
        ranks.close()


SETTINGS = [(1, Setting("nccl", "cuda")), (2, Setting())]  # two share the GPU, by gloo


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world, setting", SETTINGS)
def test_ranks_that_are_processes(mode, world, setting):
    _on_processes(world, partial(_train, mode), setting)


def test_compiled_compute(one_rank):
    torch._dynamo.reset()
    alone = _model()
    model = copy.deepcopy(alone)
    for block in model:
        fully_shard_with_compiled_compute(block)
    _trains_like(alone, model, fully_shard(model))


def _train_by_copy_engines(mode, rank):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # both ranks have one GPU
    alone = _model()
    model = copy.deepcopy(alone)
    call = _shard(model, mode)
    for unit in (*model, model):
        unit.set_symm_mem_for_comm("CUDA")
    _trains_like(alone, model, call)


@pytest.mark.parametrize("mode", MODES)
def test_symmetric_memory_and_copy_engines(mode):
    _on_processes(2, partial(_train_by_copy_engines, mode), Setting())


@pytest.fixture
def communicates(one_rank):
    """The default group, whose communicator exists."""
    part = torch.randn(1000, device="cuda")
    backend.all_gather(torch.empty_like(part), part, dist.group.WORLD).wait()
    return dist.group.WORLD


def _gathers(gather, group):
    part = torch.randn(1000, device="cuda")
    out = gather.allocate((1000,), dtype=part.dtype, device=part.device)
    work = gather(out, part, group)
    if work is not None:
        work.wait()
    torch.testing.assert_close(out, part, rtol=0, atol=0)


def test_memory_of_nccl(communicates):
    device = torch.device("cuda", torch.cuda.current_device())
    if not backend.backend_of(communicates, device).supports_tensor_alloc(device):
        pytest.skip("NCCL allocates no tensors on this GPU")
    _gathers(communicators.ProcessGroupAllGather(communicates, device), communicates)


def test_symmetric_memory_of_nccl(communicates):
    device = torch.device("cuda", torch.cuda.current_device())
    _gathers(communicators.symmetric_all_gather(device, "NCCL", (communicates.group_name,)), communicates)


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointing(mode, one_rank):
    torch._dynamo.reset()
    alone = _model()
    model = nn.Sequential(*map(Checkpointed, copy.deepcopy(alone)))
    _trains_like(alone, model, _shard(model, mode))


class Recurrent(nn.LSTM):
    """Moves its parameters into memory of cuDNN's. It takes four steps, as a graph has each of them."""

    def forward(self, x):
        return super().forward(x.unflatten(0, (4, -1)))[0].flatten(0, 1)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_recurrent_modules(one_rank):
    torch.manual_seed(0)
    alone = nn.Sequential(*(Recurrent(WIDTH, WIDTH) for _ in range(2))).cuda()
    model = copy.deepcopy(alone)
    _trains_like(alone, model, _shard(model, "eager"), rtol=1e-2)  # cuDNN multiplies in TF32


def test_recurrent_modules_in_one_graph(one_rank):
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone = nn.Sequential(*(Recurrent(WIDTH, WIDTH) for _ in range(2))).cuda()
    model = copy.deepcopy(alone)
    with torch._dynamo.config.patch(allow_rnn=True):
        _trains_like(alone, model, _shard(model, "full"), rtol=1e-2)  # cuDNN multiplies in TF32


@pytest.mark.parametrize("mode", MODES)
def test_float8_products(mode, one_rank):
    float8 = pytest.importorskip("torchao.float8")
    torch._dynamo.reset()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    alone = float8.convert_to_float8_training(_model().bfloat16(), config=config)
    model = float8.convert_to_float8_training(_model().bfloat16(), config=config)
    call = _shard(model, mode)
    apart = torch.compile(alone, fullgraph=True) if mode == "full" else alone
    for x in torch.randn(3, 32, WIDTH, device="cuda", dtype=torch.bfloat16):
        want, got = (each(x).float().square().mean() for each in (apart, call))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
        want.backward()
        got.backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (ours.grad.to_local() - theirs.grad).norm() < 0.05 * theirs.grad.norm()
        model.zero_grad()
        alone.zero_grad()


def test_whole_weights(one_rank):
    alone = _model()
    model = copy.deepcopy(alone)
    _shard(model, "eager")
    streamed = dict(stream_parameters(model, dtype=torch.bfloat16))
    for name, want in alone.state_dict().items():
        assert streamed[name].is_cuda
        torch.testing.assert_close(streamed[name], want.bfloat16(), rtol=0, atol=0)
    x = torch.randn(32, WIDTH, device="cuda")
    with torch.no_grad(), unsharded(model):
        torch.testing.assert_close(model(x), alone(x))


def test_a_profile_compared_with_its_capture(many_ranks, tmp_path):
    torch._dynamo.reset()
    model = _model(2048)
    call, x = _shard(model, "full"), torch.randn(4096, 2048, device="cuda")
    found = capture(model, x)
    for _ in range(2):
        call(x).sum().backward()
    with torch.profiler.profile(
        record_shapes=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    ) as profile:
        for _ in range(3):
            call(x).sum().backward()
            profile.step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    compared = found.compare(tmp_path / "trace.json")
    print(found, compared, sep="\n")
    measured = {each.part: each.measured_us for each in compared.parts}
    assert measured["matrix products"] > 0


def test_the_doctor_sees_the_gpu():
    run = subprocess.run(
        [sys.executable, "-m", "fsdp_compiled", "doctor"], capture_output=True, text=True, timeout=120
    )
    print(run.stdout, run.stderr)
    assert torch.cuda.get_device_name() in run.stdout


def test_products_tuned_by_measurement(one_rank):
    torch._dynamo.reset()
    alone = _model()
    model = copy.deepcopy(alone)
    _shard(model, "eager")
    call = fsdp_compiled.compile(model, fullgraph=True, mode="max-autotune-no-cudagraphs")
    _trains_like(alone, model, call, rtol=1e-2)  # the fastest may be in TF32


def test_cuda_graphs_are_refused(many_ranks):
    torch._dynamo.reset()
    model = _model()
    _shard(model, "eager")
    with pytest.raises(Exception, match="CUDA graphs .* cannot hold collectives"):
        torch.compile(model, mode="reduce-overhead")(torch.randn(32, WIDTH, device="cuda"))
