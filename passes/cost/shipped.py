"""The clusters that ship, each constant with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .cluster import Cluster, Link

# NCCL's ring: base latency and latency per hop of the Simple protocol, over NVLink and over the network.
# *Source:* baseLat and hwLat in NCCL's src/graph/tuning.cc.
_NCCL_BASE_US, _NVLINK_HOP_US, _NETWORK_HOP_US = 8.4, 3.4, 14.0
_NVLINK_USABLE = 370 / 450  # of its line rate, after protocol. *Source:* NVIDIA/nccl-tests issue 212 (H100).
# Of a network card's line rate. *Source:* 46 of 50 GB/s for a 400 Gb/s card, NVIDIA/nccl-tests issue 290; 75 of
# 100 GB/s for the eight 100 Gb/s cards of an A100 node, NVIDIA/nccl issue 495.
_CARD_USABLE, _A100_CARD_USABLE = 46 / 50, 75 / 100

# Of what products and attention reach alone, what is left within steps. *Source:* fitted to the first eleven of the
# published steps that examples/bench/published.py lists, together.
_PRODUCTS_IN_STEPS, _ATTENTION_IN_STEPS = 0.85, 0.6
# Of the peak, what matrix products of the shapes of language models reach within steps. *Source:* H100 and H200:
# 0.691 to 0.717 in steps of five models on an H200 at its limit of 700 W, torch 2.11 (examples/bench/gpu_steps.py).
# Others, alone: B200, 1448 to 1562 of 2250 TFLOP/s (arXiv:2604.23466, tables III and IV); A100, 0.859 by the best of
# all shapes, where the H100 reaches 0.803 (stas00/ml-engineering, Maximum Achievable Matmul FLOPS), and 0.73 by those
# of language models (720 of 989 TFLOP/s; SemiAnalysis, MI300X vs H100 vs H200 Benchmark Part 1).
_PRODUCTS = {"H100": 0.695, "A100": _PRODUCTS_IN_STEPS * 0.73 * 0.859 / 0.803, "B200": _PRODUCTS_IN_STEPS * 0.67}
# Of the peak, what causal attention with heads of 128 features reaches within steps, forward and backward. *Source:*
# H100 and H200: by cuDNN, which PyTorch takes there, in these steps, 0.45 with sequences of 2048 to 0.52 with 8192,
# and 0.38 to 0.45. Others, alone, by flash attention of version 2: A100, up to 0.73 and 0.63 (arXiv:2307.08691),
# times 0.9, which causal ones reach of others on the H100; B200, as an H100, 333 and 318 of 989 TFLOP/s
# (arXiv:2407.08608).
_ATTENTION = {
    "H100": (0.49, 0.42),
    "A100": (_ATTENTION_IN_STEPS * 0.9 * 0.73, _ATTENTION_IN_STEPS * 0.9 * 0.63),
    "B200": (_ATTENTION_IN_STEPS * 333 / 989, _ATTENTION_IN_STEPS * 318 / 989),
}
# Of the bandwidth, what copies and sums of arrays reach. *Source:* 3.02 to 3.09 of 3.35 TB/s on an H100.
_MEMORY = 0.9
# Of GPU memory, which NVIDIA counts in GiB, what PyTorch finds. *Source:* 79.25 of an A100's 80 GiB, in its messages
# (wbfwonderful/Vad-R1 issue 11).
_MEMORY_FOUND = 79.25 / 80
# Of the clock, and so of the FLOP/s of products and attention, what is left at 500 of 700 W: power above that of an
# idle GPU, some 100 W, grows as the clock to the power of 2.5. An estimate: not measured, and fitted to nothing.
_AT_500_W = (400 / 600) ** (1 / 2.5)


def _found(memory_gib: int) -> int:
    return int(_MEMORY_FOUND * memory_gib * 2**30)


def _gpu(
    name: str,
    tflops: tuple[float, float],
    memory: tuple[int, float],  # GiB, and 1e9 bytes a second
    nvlink_gb: float,
    card_gb: float,
    like: str = "",
) -> Cluster:
    tflops_16, tflops_32 = tflops
    return Cluster(
        name=name,
        flops_16bit=tflops_16 * 1e12,
        flops_32bit=tflops_32 * 1e12,
        memory_bytes_per_s=memory[1] * 1e9,
        kernel_us=7.0,  # *Source:* AutoParallel's launch floor.
        intra=Link(_NCCL_BASE_US, _NVLINK_HOP_US, _NVLINK_USABLE * nvlink_gb * 1e9),
        inter=Link(_NCCL_BASE_US, _NETWORK_HOP_US, card_gb * 1e9),
        piece_us=_NCCL_BASE_US,  # not measured: as if each piece of a group waited for the one before
        efficiency=_PRODUCTS[like or name],
        memory_efficiency=_MEMORY,
        memory_bytes=_found(memory[0]),
        attention_efficiency=_ATTENTION[like or name],
    )


_H100 = _gpu("H100", (989, 67), (80, 3350), 450, _CARD_USABLE * 50)


CLUSTERS: Mapping[str, Cluster] = {
    # *Source:* NVIDIA's datasheets (SXM parts): dense bf16 and fp32 FLOP/s, memory, half of NVLink's two-way
    # bandwidth; one network card for each GPU as in NVIDIA's DGX systems; PCIe 5.0, for the A100 4.0.
    "H100": _H100,
    # The part with 96 GB of HBM2e at 500 W.
    "H100-500W": replace(
        _H100,
        name="H100-500W",
        flops_16bit=_AT_500_W * _H100.flops_16bit,
        flops_32bit=_AT_500_W * _H100.flops_32bit,
        memory_bytes_per_s=2400e9,
        memory_bytes=_found(96),
    ),
    "H200": _gpu("H200", (989, 67), (141, 4800), 450, _CARD_USABLE * 50, like="H100"),
    "A100": replace(_gpu("A100", (312, 19.5), (80, 2039), 300, _A100_CARD_USABLE * 25), host_bytes_per_s=32e9),
    "B200": _gpu("B200", (2250, 75), (180, 8000), 900, _CARD_USABLE * 50),
    # *Source:* measured: two ranks with one thread each on a 2-core x86-64 virtual machine, torch 2.13.0. fp32
    # products 93 GFLOP/s and copies 17 GB/s read and written (both 0.7 of what stands here), gloo all-gathers
    # 0.4 ms and 0.6 ms a MiB, twice that a MiB beyond 16 MiB, reduce-scatters by exchange a tenth less a MiB; 10 us
    # for each further buffer of coalesced all-gathers; 1 us to launch a kernel, 93 us in a step for each parameter.
    "CPU": Cluster(
        name="CPU",
        flops_16bit=300e9,  # by AVX-512 BF16
        flops_32bit=133e9,
        memory_bytes_per_s=25e9,
        kernel_us=2.0,
        intra=Link(400.0, 50.0, 0.85e9, reduce_factor=0.9, knee_bytes=16 * 2**20),
        # Between hosts the wire takes time, but no cores. *Source:* measured between two network namespaces on that
        # machine, at 1 and 2.5 Gbit/s. The rate is for networks that are not known: gloo's over 2.5 Gbit/s. Schedules
        # for half and for twice that took the same time over 1 Gbit/s within 2%; those for 0.85e9 took 15% more.
        inter=Link(600.0, 50.0, 0.2e9, compute_blocked_fraction=0.15, host_us=550.0),
        compute_blocked_fraction=1.0,
        piece_us=10.0,
        host_bytes_per_s=25e9,  # its own memory
        on_host=True,
        launch_us=1.0,
        parameter_us=93.0,
    ),
}
