"""Methods of FSDPModule, called wrongly."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_compiled import fully_shard, share_comm_ctx
from tests.errors.models import Model

pytestmark = pytest.mark.usefixtures("fake_group")


def test_methods():
    model = fully_shard(Model())
    with pytest.raises(
        ValueError, match="set_modules_to_forward_prefetch: expected modules given to fully_shard, got Linear"
    ):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(
        TypeError, match="set_modules_to_backward_prefetch: expected a list of modules, got FSDPModel"
    ):
        model.set_modules_to_backward_prefetch(model)
    for method in (model.set_requires_gradient_sync, model.set_reshard_after_forward, model.unshard):
        with pytest.raises(TypeError, match="expected True or False, got 1 of int"):
            method(1)
    for factor, error in ((0, ValueError), (-1.0, ValueError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match="factor: expected a"):
            model.set_gradient_divide_factor(factor)
    for count, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="max_input_buffers: expected a"):
            model.set_reduce_scatter_max_input_buffers(count)
    for method, wanted in (
        (model.set_custom_all_gather, "AllGather"),
        (model.set_custom_reduce_scatter, "ReduceScatter"),
    ):
        with pytest.raises(TypeError, match=f"comm: expected an {wanted}, got 3 of int"):
            method(3)
    with pytest.raises(TypeError, match="hook: expected a function, got 3"):
        model.set_all_reduce_hook(3)
    with pytest.raises(TypeError, match="stream: expected a torch.Stream or None, got 3 of int"):
        model.set_all_reduce_hook(print, stream=3)
    with pytest.raises(ValueError, match="FSDPModule|expected a module given to fully_shard, got one without state"):
        fully_shard.state(nn.Linear(1, 1))
    assert fully_shard.state(model) is model._get_fsdp_state()
    with pytest.raises(ValueError, match="share_comm_ctx: expected modules given to fully_shard, got Linear"):
        share_comm_ctx([nn.Linear(1, 1)])
