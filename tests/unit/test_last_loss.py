"""The reported loss: what is on the CPU is read at once."""

from __future__ import annotations

import torch

from gpucloud.resume.folder import LastLoss


def test_before_the_first_step_there_is_none() -> None:
    assert LastLoss().now() is None
    assert LastLoss().final() is None


def test_numbers_and_tensors_on_the_cpu_are_known_at_once() -> None:
    loss = LastLoss()
    loss.offer(0.5)
    assert loss.now() == 0.5
    loss.offer(torch.tensor(0.25, requires_grad=True))
    assert loss.now() == 0.25


def test_a_tensor_with_one_element_in_any_shape_will_do() -> None:
    loss = LastLoss()
    loss.offer(torch.tensor([[2.0]]))
    assert (loss.now(), loss.final()) == (2.0, 2.0)


def test_the_graph_behind_a_loss_is_let_go() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = LastLoss()
    loss.offer((weight * 2).sum())
    assert loss._newest.grad_fn is None
