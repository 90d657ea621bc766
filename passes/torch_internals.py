"""Torch's private names that the passes use, in one place for each new version.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._functorch import config as _functorch_config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name as get_aot_graph_name
from torch._guards import CompileContext as CompileContext
from torch._guards import TracingContext as TracingContext
from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_cache as get_invoke_subgraph_cache
from torch._inductor import config as config
from torch._inductor import custom_graph_pass as custom_graph_pass
from torch._inductor import decomposition as decomposition
from torch._inductor import ir as ir  # its types are not complete
from torch._inductor import list_mode_options as list_mode_options
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering as preserve_node_ordering
from torch._inductor.utils import get_donated_idxs as get_donated_idxs
from torch._inductor.virtualized import V as V
from torch._logging import _internal as _internal  # of logs and traces
from torch.distributed import distributed_c10d
from torch.utils._ordered_set import OrderedSet as OrderedSet

functorch_config = _functorch_config
CONJUGATE = torch._C.DispatchKey.Conjugate


def groups() -> Mapping[dist.ProcessGroup, str]:
    """Return this process's groups with their names."""
    return distributed_c10d._world.pg_names
