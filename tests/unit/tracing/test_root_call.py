"""Which failures of a call of an outermost unit other ranks are told."""

from __future__ import annotations

from threading import Thread
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from fsdp_compiled import fully_shard
from fsdp_compiled.agreement import peers
from fsdp_compiled.tracing import root_call

pytestmark = pytest.mark.usefixtures("fake_group")

X = torch.ones(2, 4)


def test_an_interrupt_before_forward_is_told():
    model = fully_shard(nn.Linear(4, 4))
    with (
        mock.patch.object(peers, "report_failure") as reported,
        mock.patch.object(root_call, "watch_compiles", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        model(X)
    reported.assert_called_once_with(caught.value)
    model(X).sum().backward()


def test_a_second_threads_error_is_not_and_leaves_the_step():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    errors = []

    def second():
        try:
            model(X)
        except RuntimeError as error:
            errors.append(str(error))

    def call_from_another_thread(*_):
        thread = Thread(target=second)
        thread.start()
        thread.join()

    model[0].register_forward_pre_hook(call_from_another_thread)
    with mock.patch.object(peers, "report_failure") as reported:
        model(X).sum().backward()
    assert "expected one thread at a time in the model's forward" in errors.pop()
    reported.assert_not_called()
    assert model[0].weight.grad is not None


def test_a_trace_in_a_function_after_dynamo_was_reset_withdraws_reports_and_is_followed_by_known_ones():
    model = fully_shard(nn.Linear(4, 4))
    torch._dynamo.reset()  # forgets callbacks, and no call of the model outside of the graph sets them again
    with mock.patch.object(peers, "withdraw_report") as withdrawn:
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(X)
    withdrawn.assert_called()
    assert peers.callbacks[0] in callback_handler.start_callbacks
