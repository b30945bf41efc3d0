"""One worker without a server is the plain optimizer, bit for bit."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import OPTIMIZERS, gradients_at, loss_at, make_model, values_of
from torch import nn

import psplus

STEPS = 12
Wrapping = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


def lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)


ALL = {**OPTIMIZERS, "LBFGS": lbfgs}


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Equal bit for bit, through any nesting."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where


def trained(name: str, wrapping: Wrapping, closures: bool) -> tuple[Any, Any, list[Any]]:
    """Parameters, state dict and losses after a few steps."""
    model = make_model()
    optimizer = wrapping(ALL[name](list(model.parameters())))
    losses = []
    for step in range(STEPS):
        if closures:

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_at(model, 0, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach().clone())
        else:
            gradients_at(model, 0, step)
            losses.append(optimizer.step())
    return values_of(model), optimizer.state_dict(), losses


def test_the_list_of_optimizers_is_complete() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer", "SparseAdam"} == set(ALL)


@pytest.mark.parametrize(
    ("name", "closures"),
    [*((name, False) for name in sorted(OPTIMIZERS)), *((name, True) for name in sorted(ALL))],
)
def test_bit_equal_to_the_plain_optimizer(name: str, closures: bool) -> None:
    assert_equal(trained(name, psplus.wrap, closures), trained(name, lambda o: o, closures))


@pytest.mark.parametrize("scheme", ["bsp", "ssp", "asp", "ps+"])
def test_every_scheme_is_the_plain_optimizer_and_starts_nothing(
    scheme: str, clean_job: Path
) -> None:
    options = {"staleness_bound": 1} if scheme == "ssp" else {}
    wrapped = trained("Adam", lambda o: psplus.wrap(o, scheme, **options), closures=False)
    assert_equal(wrapped, trained("Adam", lambda o: o, closures=False))
    assert list(clean_job.iterdir()) == []


def test_sparse_adam() -> None:
    def run(wrapping: Wrapping) -> torch.Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 3, sparse=True)
        optimizer = wrapping(torch.optim.SparseAdam(embedding.parameters(), lr=0.1))
        for step in range(STEPS):
            optimizer.zero_grad()
            embedding(torch.tensor([step % 10, 3, 3])).square().sum().backward()
            optimizer.step()
        return embedding.weight.detach().clone()

    assert torch.equal(run(psplus.wrap), run(lambda o: o))


def test_c22_resume_is_bit_equal() -> None:
    for name in ("SGD", "Adam", "Adagrad"):

        def run(resume: bool, name: str = name) -> Any:
            model = make_model()
            optimizer = psplus.wrap(OPTIMIZERS[name](list(model.parameters())))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
            for step in range(40):
                if resume and step == 20:
                    saved = pickle.dumps(
                        [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
                    )
                    model = make_model(seed=9)
                    optimizer = psplus.wrap(OPTIMIZERS[name](list(model.parameters())))
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
                    for part, state in zip(
                        (model, optimizer, scheduler), pickle.loads(saved), strict=True
                    ):
                        part.load_state_dict(state)
                gradients_at(model, 0, step)
                optimizer.step()
                scheduler.step()
            return values_of(model), optimizer.state_dict()

        assert_equal(run(resume=True), run(resume=False))


def poisoned(model: nn.Module, value: float = float("nan")) -> None:
    gradients_at(model, 0, 0)
    model[2].weight.grad[1, 2] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_changes_no_state(value: float) -> None:
    model = make_model()
    optimizer = psplus.wrap(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    gradients_at(model, 0, 0)
    optimizer.step()
    before = copy.deepcopy((values_of(model), optimizer.state_dict()))
    poisoned(model, value)
    with pytest.warns(RuntimeWarning, match=r"rank 0 skipped step 2: .*'2.weight'") as warned:
        optimizer.step()
    assert warned[0].filename == __file__
    assert_equal((values_of(model), optimizer.state_dict()), before)
    assert (optimizer.stats.step, optimizer.stats.skipped_steps) == (2, 1)


def test_a_bad_gradient_found_in_a_closure_changes_no_state() -> None:
    model = make_model()
    optimizer = psplus.wrap(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    before = values_of(model)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        poisoned(model)
        return 4.25

    with torch.no_grad(), pytest.warns(RuntimeWarning, match="skipped step 1"):
        assert optimizer.step(closure) == 4.25
    assert calls == [True]
    assert_equal(values_of(model), before)
    assert len(optimizer.state) == 0


def test_a_bad_gradient_can_raise_or_pass() -> None:
    model = make_model()
    strict = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), nonfinite="raise")
    before = values_of(model)
    poisoned(model)
    with pytest.raises(psplus.Error, match=r"'0\.2' is not finite at step 1"):
        strict.step()
    assert_equal(values_of(model), before)

    lax = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), nonfinite="allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lax.step()
    assert model[2].weight[1, 2].isnan()
    assert not model[2].weight[1, 1].isnan()


def test_extras_do_nothing_to_one_worker() -> None:
    model = make_model()
    with psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0)) as optimizer:
        before = values_of(model)
        optimizer.synchronize()
        optimizer.pull()
        optimizer.publish()
        with optimizer.evaluation():
            assert_equal(values_of(model), before)
        assert_equal(values_of(model), before)
        assert optimizer.step_vector.tolist() == [0]
        assert optimizer.step_vector.dtype == torch.int64
        assert optimizer.stats.num_workers == 1
    with pytest.raises(psplus.Error, match="closed"):
        optimizer.step()
    optimizer.close()


def test_copies_and_pickles_go_on_alike() -> None:
    model = make_model()
    optimizer = psplus.wrap(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    gradients_at(model, 0, 0)
    optimizer.step()
    for twin_model, twin in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        reference_model, reference = copy.deepcopy((model, optimizer))
        for m, o in ((twin_model, twin), (reference_model, reference)):
            gradients_at(m, 0, 1)
            o.step()
        assert_equal(values_of(twin_model), values_of(reference_model))
        assert twin.stats.step == 2


def test_an_optimizer_has_one_open_wrapper() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    first = psplus.wrap(inner, model=model)
    with pytest.raises(psplus.ConfigError, match="wrapped already"):
        psplus.wrap(inner, model=model)
    first.close()
    second = psplus.wrap(inner, model=model)
    del second
    psplus.wrap(inner, model=model).step()


def test_groups_may_be_added_later() -> None:
    model, head = make_model(), nn.Linear(3, 2)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    head.weight.grad = torch.full_like(head.weight, float("nan"))
    with pytest.warns(RuntimeWarning, match=r"'1\.0'"):
        optimizer.step()
    head.weight.grad = torch.ones_like(head.weight)
    before = head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(head.weight, before - 0.5)
