"""What tests of sharded models need: small models, parity checks, ways to look inside, ranks, and all three modes.

The names are those that users of torch's own test package for FSDP2 know, for this library's ``fully_shard``.
Nothing here is imported by ``import fsdp_compiled``.

Differences that a test may notice:

* ``init`` of the models takes arguments of ``fully_shard`` as ``fsdp_kwargs``; delays make the host sleep.
* The functions given to ``patch_*`` take what this library passes at that place; each docstring says what. The
  context managers give the original as their ``as`` value. Where ranks are threads each rank sees its own.
* The patches of collectives see those of compiled graphs, too; those of a unit's operations see few of a graph's.
* ``FSDPTest`` starts its processes once per class and not once per test; each test gets a new process group.

Left out, because only torch's first FSDP has it: ``FSDPTestMixin`` with ``_test_fsdp_parity`` and its checks of
``cpu_offload``, ``backward_prefetch`` and ``forward_prefetch`` (constructor arguments that ``fully_shard`` does not
have), ``auto_wrap_policy`` and ``get_ignored_modules``. ``FSDPTestContinuous`` is what ``FSDPTest`` is here.
"""

from .cases import FSDPTest, FSDPTestMultiThread
from .delays import ModuleWithDelay, NestedWrappedModuleWithDelay
from .experts import MixtureOfExperts
from .interface import DEVICEInitMode, FSDPInitMode, FSDPTestModel, seeded
from .models import (
    MLP,
    DoubleLinear,
    DummyDDP,
    MLPStack,
    NestedLinear,
    SkipModel,
    SkipModule,
)
from .modes import FullyShardMode, compiled_fsdp_test
from .nested import AlwaysWrapNestedWrappedModule, NestedWrappedModule, NonUniformReqGradNWM
from .parity import (
    DummyProcessGroup,
    check_sharded_parity,
    get_full_params,
    reduce_scatter_with_assert,
    run_subtests,
    subtest_name,
)
from .patches import (
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
)
from .processes import RankProcesses
from .transformer import TransformerWithSharedParams

__all__ = [
    "MLP",
    "AlwaysWrapNestedWrappedModule",
    "DEVICEInitMode",
    "DoubleLinear",
    "DummyDDP",
    "DummyProcessGroup",
    "FSDPInitMode",
    "FSDPTest",
    "FSDPTestModel",
    "FSDPTestMultiThread",
    "FullyShardMode",
    "MLPStack",
    "MixtureOfExperts",
    "ModuleWithDelay",
    "NestedLinear",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "RankProcesses",
    "SkipModel",
    "SkipModule",
    "TransformerWithSharedParams",
    "check_sharded_parity",
    "compiled_fsdp_test",
    "get_full_params",
    "patch_all_gather",
    "patch_all_reduce",
    "patch_foreach_all_gather",
    "patch_foreach_reduce",
    "patch_post_backward",
    "patch_reduce_scatter",
    "patch_register_post_backward_hook_backward",
    "patch_reshard",
    "patch_unshard",
    "reduce_scatter_with_assert",
    "run_subtests",
    "seeded",
    "subtest_name",
]
