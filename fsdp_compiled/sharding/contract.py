"""What the ranks of a process group must agree on before they start collectives, as records that can be compared."""

from __future__ import annotations

import zlib
from base64 import b85decode, b85encode
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from hashlib import sha256

from .spec import Bucket, ParamSpec, Text, word


@dataclass(frozen=True)
class ContractLine(Text):
    """One collective as every rank of its group must see it."""

    group: str  # name of the process group
    kind: str  # such as "all-gather" or "reduce-scatter"
    how: str  # the dtype that travels and, of a reduction, how the sum becomes a mean
    params: tuple[str, ...]  # name, dtype and shape of each parameter, in packing order
    form: str = ""  # how the buffers are made up, where ranks could differ in it


@dataclass(frozen=True)
class Contract(Text):
    """Collectives that ranks agree on at once: one that a hook starts, or all of a graph, in order of launch.

    ``basis`` is what they were decided from, "name: value" each. It is not compared, but tells why ranks differ.
    """

    collectives: tuple[ContractLine, ...]
    basis: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """The same for the same collectives in the same order."""
        return sha256(Contract(self.collectives).encode().encode()).hexdigest()

    @cached_property
    def by_group(self) -> dict[str, Contract]:
        """What each process group has to agree on, by its name: its own collectives."""
        groups: dict[str, list[ContractLine]] = {}
        for each in self.collectives:
            groups.setdefault(each.group, []).append(each)
        return {name: Contract(tuple(collectives), self.basis) for name, collectives in groups.items()}

    def pack(self) -> str:
        """Return a short text for a graph to carry."""
        return b85encode(zlib.compress(self.encode().encode(), 9)).decode()

    @classmethod
    @cache
    def unpack(cls, text: str) -> Contract:
        """Read back what :meth:`pack` wrote: the same record for the same text."""
        return cls.decode(zlib.decompress(b85decode(text)).decode())


def line_of(bucket: Bucket, stage: str) -> ContractLine | None:
    """Return one stage of a bucket as other ranks see it; None if it involves none."""
    group = bucket.group_of(stage)
    if group is None or group.world == 1:
        return None
    params = tuple(map(_described, bucket.params))
    return ContractLine(group.name, stage.replace("_", "-"), bucket.spec.how, params, bucket.form)


@lru_cache(maxsize=4096)
def contract_of(bucket: Bucket) -> Contract:
    """Return what ranks have to agree on before a bucket travels alone; the same record for an equal bucket."""
    return Contract(tuple(each for stage in bucket.stages if (each := line_of(bucket, stage))))


def _described(param: ParamSpec) -> str:
    dim = f" sharded along dim {param.dim}" if param.dim else ""
    return f"{param.name} {word(param.dtype)}{list(param.shape or ())}{dim}"
