"""Which cluster this process is in: what the first rank sees, all ranks take, as their graphs must be alike."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...expect import unexpected
from ...sharding.dtensor import first_rank, store_of
from ...sharding.mesh import siblings_of
from ..torch_internals import groups
from .cluster import Cluster
from .cluster_file import as_text, named, parse
from .shipped import CLUSTERS

VARIABLE = "FSDP_COMPILED_CLUSTER"  # a cluster's name or file, where no policy has one
# How many ranks are on this machine, as those who start them say: torchrun, Open MPI, Slurm, MPICH.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "MPI_LOCALNRANKS")
# Of its line rate, what collectives reach. *Source:* 46 of 50 GB/s for InfiniBand, NVIDIA/nccl-tests issue 290; gloo
# over TCP, measured: 72 to 91 of 125 MB/s.
_INFINIBAND_USABLE, _ETHERNET_USABLE = 46 / 50, 0.65
_PCIE_USABLE = 0.8  # of its line rate. *Source:* not measured; as of NVLink


# By default group, which owns it, so that a new one starts with nothing, and by type of device: the rank that tells
# the others its cluster, and that cluster once it is known.
_shared: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[int, Cluster | None]]] = WeakKeyDictionary()


def detect(device: torch.device) -> Cluster:
    """Return the cluster that ``device`` belongs to: what the first rank of the last sharded model's mesh has found.

    That is the cluster in the environment variable ``FSDP_COMPILED_CLUSTER``, else one that ships, by the device's
    name (an unknown GPU is taken for an H100), with the ranks on a node as the launcher says (else the number of this
    machine's GPUs), and the rates of the network cards where Linux tells them.
    """
    group = dist.group.WORLD
    shared = None if group is None else _shared.get(group)
    if group is None or shared is None or device.type not in shared:
        return _found(device)
    first, cluster = shared[device.type]
    if cluster is None:
        store = store_of(group)
        assert store is not None  # or nothing would be shared
        cluster = parse(store.get(_key(device, first)).decode(), "what the first rank has found")
        shared[device.type] = first, cluster
    return cluster


def share(device: torch.device, mesh: DeviceMesh) -> None:
    """Let ranks that shard over a mesh take what its first rank finds, when they ask; nobody waits here."""
    group = dist.group.WORLD
    store = None if group is None else store_of(group)
    if group is None or store is None:
        return
    shared, first = _shared.setdefault(group, {}), first_rank(mesh)
    if device.type in shared and shared[device.type][0] == first:
        return
    if dist.get_rank() == first:
        store.set(_key(device, first), as_text(detect(device)))
    shared[device.type] = first, None


def _key(device: torch.device, first: int) -> str:
    return f"fsdp_compiled/cluster/{device.type}/{first}"


def group_places() -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    """Return the name of each process group with its ranks and those of its siblings, which compile-cache keys hold.

    They are all that :meth:`Cluster.link` looks at. Groups of the first ranks, such as all ranks, are left out: there
    the world, which specs hold, tells as much, and a group for something else then leaves the keys as they are.
    """
    found = ((str(name), tuple(siblings_of(group))) for group, name in groups().items())
    return tuple(sorted((name, ranks) for name, ranks in found if ranks != (tuple(range(len(ranks[0]))),)))


def _found(device: torch.device) -> Cluster:
    """Return what this process sees."""
    if given := os.environ.get(VARIABLE):
        try:
            return named(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}: {error}") from error
    module = torch.get_device_module(device)
    is_there = device.type != "cpu" and module.is_available()
    name = module.get_device_name(device) if is_there else "CPU" if device.type == "cpu" else device.type
    chip = name.replace("GH200", "H100")  # which it has
    known = next((each for key, each in CLUSTERS.items() if re.search(rf"{key}(?!\d)", chip)), CLUSTERS["H100"])
    local = _local_ranks() or (module.device_count() if is_there else 0) or known.ranks_per_node
    intra, inter = known.intra, known.inter
    if "PCIE" in name.upper():
        intra = replace(intra, bytes_per_s=_PCIE_USABLE * known.host_bytes_per_s)
    if rate := network_bytes_per_s(Path("/sys/class")):
        inter = replace(inter, bytes_per_s=rate / local)
    return replace(known, ranks_per_node=local, intra=intra, inter=inter)


def _local_ranks() -> int:
    """Return how many ranks are on this machine; 0 where nothing tells."""
    for name in _LOCAL_RANKS:
        given = os.environ.get(name) or "0"
        if name == "SLURM_NTASKS_PER_NODE" and not given.isdecimal():
            continue  # of several nodes: "8(x4)"
        if not given.isdecimal():
            raise unexpected(name, "the number of ranks on this machine", repr(given), "unset it")
        if int(given):
            return int(given)
    return 0


def network_bytes_per_s(folder: Path) -> float:
    """Return what collectives get from this machine's network cards together; 0 where ``folder`` does not tell.

    ``folder`` is Linux's ``/sys/class``. InfiniBand and RoCE cards count together; where there are none, the fastest
    of the Ethernet cards, as gloo and NCCL's sockets take one interface each. An interface without a device, such as
    a container's, is no card: what it says (10 Gb/s, of Linux's veth) is no rate of a network.
    """
    infiniband = [float(words[0]) * 1e9 / 8 for words in _words(folder, "infiniband/*/ports/*/rate") if words]
    if infiniband:
        return _INFINIBAND_USABLE * sum(infiniband)
    rates = _words(folder, "net/*/speed", needs="device")
    ethernet = [int(words[0]) * 1e6 / 8 for words in rates if words and words[0].isdecimal()]
    return _ETHERNET_USABLE * max(ethernet, default=0.0)


def _words(folder: Path, pattern: str, needs: str = ".") -> Iterator[list[str]]:
    """Yield the words of each file with ``needs`` next to it, such as a card's rate: ``400 Gb/sec (4X NDR)``."""
    for path in sorted(path for path in folder.glob(pattern) if (path.parent / needs).exists()):
        with suppress(OSError):  # an interface that is down has no speed
            yield path.read_text().split()
