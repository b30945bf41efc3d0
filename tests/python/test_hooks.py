"""Step hooks are called as torch calls them, whoever takes the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import gradients_at, loss_at, make_model, values_of
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import psplus

Workers = Callable[..., list[Any]]
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused kernel": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "generic path": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1),
}


def wrap(inner: torch.optim.Optimizer, model: nn.Module, place: str) -> Any:
    if place == "no server":
        return psplus.wrap(inner, model=model)
    session = psplus.connect(server="always")
    placement = "server" if place == "placed" else "worker"
    return psplus.wrap(inner, "asp", model=model, session=session, placement=placement)


def closure_of(model: nn.Module, step: int) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        gradients_at(model, 0, step)
        return loss_at(model, 0, step).detach()

    return closure


def compare(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    place: str,
    train: Callable[[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer], None],
) -> None:
    """``train`` a model by the plain optimizer and one by the wrapped; they must end alike."""
    plain_model, model = make_model(), make_model()
    plain, inner = make(plain_model), make(model)
    train(plain_model, plain, plain)
    optimizer = wrap(inner, model, place)
    train(model, inner, optimizer)
    for name, value in values_of(plain_model).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value)
    assert not torch.equal(model[0].weight, make_model()[0].weight)
    optimizer.close()


def a_hook_that_clears_gradients(
    model: nn.Module, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    """Harmless with a closure, which comes after it."""
    inner.register_step_pre_hook(lambda opt, args, kwargs: opt.zero_grad())
    for step in range(3):
        optimizer.step(closure_of(model, step))


def a_hook_that_makes_a_gradient(
    model: nn.Module, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    inner.register_step_pre_hook(
        lambda *_: setattr(model[0].bias, "grad", torch.ones_like(model[0].bias))
    )
    for step in range(3):
        gradients_at(model, 0, step)
        model[0].bias.grad = None
        optimizer.step()


def a_hook_that_replaces_the_closure(
    model: nn.Module, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    def by_position(opt: Any, args: Any, kwargs: Any) -> Any:
        assert args == (opt,)
        return (opt, closure_of(model, 7)), kwargs

    def by_keyword(opt: Any, args: Any, kwargs: Any) -> Any:
        return (opt,), {"closure": closure_of(model, 8)}

    for target in (inner, optimizer):
        for hook in (by_position, by_keyword):
            handle = target.register_step_pre_hook(hook)
            loss = optimizer.step()
            assert loss is not None
            handle.remove()


def hooks_and_what_they_see(
    model: nn.Module, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    seen: list[tuple[str, Any, int]] = []

    def note(what: str) -> Callable[..., None]:
        def hook(opt: Any, args: Any, kwargs: Any) -> None:
            assert args[0] is opt
            assert kwargs == {}
            seen.append((what, opt, len(args)))

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("pre all")),
        register_optimizer_step_post_hook(note("post all")),
        inner.register_step_pre_hook(note("pre")),
        inner.register_step_post_hook(note("post")),
    ]
    gradients_at(model, 0, 0)
    optimizer.step()
    optimizer.step(closure_of(model, 1))
    for handle in handles:
        handle.remove()
    whats = ["pre all", "pre", "post", "post all"]
    assert [(what, opt) for what, opt, _ in seen] == [(what, inner) for what in whats] * 2
    assert [count for *_, count in seen] == [1] * 4 + [2] * 4


def a_wrong_answer(
    model: nn.Module, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    gradients_at(model, 0, 0)
    optimizer.step()
    before = values_of(model)
    for target in (inner, optimizer):
        handle = target.register_step_pre_hook(lambda *_: "nonsense")
        with pytest.raises(RuntimeError, match="must return None or"):
            optimizer.step()
        handle.remove()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


CLAIMS = [
    a_hook_that_clears_gradients,
    a_hook_that_makes_a_gradient,
    a_hook_that_replaces_the_closure,
    hooks_and_what_they_see,
    a_wrong_answer,
]


def check_all(place: str) -> None:
    for name, make in MAKERS.items():
        if place == "placed" and name != "fused kernel":
            continue  # servers hold no RMSprop
        for claim in CLAIMS:
            try:
                compare(make, place, claim)
            except BaseException as error:
                error.add_note(f"{claim.__name__}, {name}")
                raise


@pytest.mark.parametrize("place", ["no server", "server", "placed"])
def test_hooks(workers: Workers, place: str) -> None:
    workers(check_all, 1, place=place)
