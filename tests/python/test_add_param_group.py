"""Groups of parameters that are added after wrapping, while servers hold the parameters."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import OPTIMIZERS, gradients_at, make_model, values_of
from torch import nn
from workers import wait_for_file

import psplus
from psplus.optim.fused import FusedOptimizer

STEPS = 12
GROW_AT = 5
Workers = Callable[..., list[Any]]
# Fused ones, and one by the generic path.
KINDS = ["SGD", "AdamW", "Adagrad", "RMSprop"]
OPTIONS: dict[str, Any] = {"lr": 0.03}


def frozen_backbone(seed: int = 0) -> nn.Module:
    """As users begin to fine-tune: only the last layer learns."""
    model = make_model(seed)
    model[0].requires_grad_(False)
    return model


def head_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[kind](list(model[2].parameters()))


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), **(options or OPTIONS)})


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item())
        difference = (found[name].double() - value.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name}: off by {difference}"


def train_bsp(kinds: list[str], grow_at: list[int], pull: str) -> dict[str, Any]:
    rank = psplus.config.read().rank
    results = {}
    for kind in kinds:
        model = frozen_backbone()
        if grow_at[rank] != min(grow_at):
            with torch.no_grad():
                model[0].weight.add_(0.25)  # its own until it takes the servers' values
        optimizer = psplus.wrap(head_optimizer(kind, model), "bsp", model=model, pull=pull)
        for step in range(STEPS):
            if step == grow_at[rank]:
                own = OPTIONS if step == min(grow_at) else {"lr": 99.0}
                unfreeze(model, optimizer, **own)
                assert optimizer.param_groups[1]["lr"] == OPTIONS["lr"]
            gradients_at(model, rank, step)
            optimizer.step()
        assert optimizer.stats.step == STEPS
        assert optimizer.step_vector.tolist() == [STEPS] * 2
        results[kind] = values_of(model)
        optimizer.close()
    return results


def bsp_reference(kind: str, grow_at: list[int]) -> dict[str, torch.Tensor]:
    """The plain optimizers on the mean of their deltas; who has no delta counts as one of zero."""
    models = [frozen_backbone() for _ in grow_at]
    for model, when in zip(models, grow_at, strict=True):
        if when != min(grow_at):
            with torch.no_grad():
                model[0].weight.add_(0.25)
    optimizers = [head_optimizer(kind, model) for model in models]
    first = grow_at.index(min(grow_at))
    for step in range(STEPS):
        held = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if step == grow_at[rank]:
                with torch.no_grad():
                    for p, w in zip(model.parameters(), models[first].parameters(), strict=True):
                        p.copy_(w)
                unfreeze(model, optimizer)
            held.append({p for group in optimizer.param_groups for p in group["params"]})
        before = values_of(models[first])
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in before.items()}
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            gradients_at(model, rank, step)
            optimizer.step()
            for name, p in model.named_parameters():
                if p in held[rank]:
                    total[name] += before[name].double() - p.detach().double()
        with torch.no_grad():
            for rank, model in enumerate(models):
                for name, p in model.named_parameters():
                    if p in held[rank]:
                        p.copy_(before[name].double() - total[name] / len(models))
    return values_of(models[first])


@pytest.mark.parametrize(
    ("grow_at", "pull"),
    [
        pytest.param([GROW_AT, GROW_AT], "mapped", id="together"),
        pytest.param([2, 7], "mapped", id="one_after_the_other"),
        pytest.param([7, 2], "buffered", id="buffered_rank_1_first"),
        pytest.param([0, 1], "buffered", id="before_the_first_step"),
    ],
)
def test_c17_bsp_is_the_plain_optimizer_on_mean_deltas(
    workers: Workers, grow_at: list[int], pull: str
) -> None:
    found = workers(train_bsp, 2, kinds=KINDS, grow_at=grow_at, pull=pull)
    for kind in KINDS:
        expected = bsp_reference(kind, grow_at)
        for of_rank in found:
            assert_close(of_rank[kind], expected)
            for name, value in of_rank[kind].items():
                assert torch.equal(value, found[0][kind][name])


def train_alone(kinds: list[str], pull: str, through_server: bool = True) -> dict[str, Any]:
    """Two groups in a row, one more later, and a scheduler that was made before."""
    results = {}
    for kind in kinds:
        model = make_model()
        weight, bias = model[0].weight, model[0].bias
        model[0].requires_grad_(False)
        extra = nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        optimizer = OPTIMIZERS[kind]([model[2].weight])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if through_server:
            session = psplus.connect(server="always")
            optimizer = psplus.wrap(optimizer, "ps+", model=model, session=session, pull=pull)
        for step in range(STEPS):
            if step == 3:
                weight.requires_grad_(True)
                optimizer.add_param_group({"params": weight, "lr": 0.02})
                optimizer.add_param_group({"params": [model[2].bias]})
            if step == 8:
                bias.requires_grad_(True)
                optimizer.add_param_group({"params": [bias, extra], "lr": 0.04})
            gradients_at(model, 0, step)
            extra.grad = torch.cos(extra.detach() + step)
            optimizer.step()
            scheduler.step()
        if through_server:
            assert optimizer.stats.pushes == STEPS
            optimizer.synchronize()
            optimizer.close()
        results[kind] = {**values_of(model), "extra": extra.detach().clone()}
        results[kind]["lr"] = torch.tensor([g["lr"] for g in optimizer.param_groups])
    if through_server:
        psplus.connect(server="always").close()
    return results


@pytest.mark.parametrize("pull", ["mapped", "buffered"])
def test_one_worker_through_a_server_is_the_plain_optimizer(workers: Workers, pull: str) -> None:
    kinds = [kind for kind in OPTIMIZERS if kind != "Muon"]  # which takes matrices only
    (found,) = workers(train_alone, 1, kinds=kinds, pull=pull)
    expected = train_alone(kinds, pull, through_server=False)
    for kind in kinds:
        assert_close(found[kind], expected[kind])


def fused_steps_go_on() -> None:
    prepare, taken = FusedOptimizer.prepare, []

    def counting(optimizer: FusedOptimizer) -> Any:
        prepared = prepare(optimizer)
        taken.append(prepared is not None)
        return prepared

    FusedOptimizer.prepare = counting  # type: ignore[method-assign]
    train_alone(["SGD", "Adam"], "mapped")
    assert taken == [True] * (2 * STEPS)


def test_fused_steps_go_on(workers: Workers) -> None:
    workers(fused_steps_go_on, 1)


def step_with_ones(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def wrapped(
    params: list[nn.Parameter], model: nn.Module | None = None, **options: Any
) -> psplus.DistributedOptimizer:
    session = psplus.connect(server="always")
    optimizer = torch.optim.SGD(params, lr=1.0)
    return psplus.wrap(optimizer, "asp", model=model, session=session, **options)


def every_call_covers_them() -> None:
    for pull in ("mapped", "buffered"):
        model = make_model()
        optimizer = wrapped(list(model[2].parameters()), model, pull=pull)
        step_with_ones(optimizer)
        with optimizer.evaluation():  # pull buffers from before the group
            pass
        optimizer.add_param_group({"params": list(model[0].parameters())})
        start = values_of(model)
        step_with_ones(optimizer)
        for name, p in model.named_parameters():
            assert torch.equal(p, start[name] - 1.0), name
        moved = values_of(model)

        with torch.no_grad():
            model[0].weight.fill_(3.0)
        with pytest.raises(psplus.Error, match=r"'0\.weight' was changed outside"):
            optimizer.step()
        with optimizer.evaluation():
            assert torch.equal(model[0].weight, moved["0.weight"])
            with pytest.raises(psplus.Error, match=r"inside evaluation\(\)"):
                optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        assert torch.equal(model[0].weight, torch.full((7, 6), 3.0))
        optimizer.pull()
        assert torch.equal(model[0].weight, moved["0.weight"])
        with torch.no_grad():
            model[0].weight.fill_(4.0)
        optimizer.publish()
        with torch.no_grad():
            model[0].weight.fill_(0.0)
        optimizer.pull()
        assert torch.equal(model[0].weight, torch.full((7, 6), 4.0))

        model.zero_grad()
        before = values_of(model)
        model[0].bias.grad = torch.full((7,), float("nan"))
        with pytest.warns(RuntimeWarning, match=r"'0\.bias'"):
            optimizer.step()
        optimizer.synchronize()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]), name
        optimizer.close()
        with pytest.raises(psplus.Error, match=r"add_param_group\(\) after close"):
            optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def test_every_call_covers_them(workers: Workers) -> None:
    workers(every_call_covers_them, 1)


def a_write_from_outside_is_noticed_across_it() -> None:
    model = make_model()
    optimizer = wrapped(list(model[2].parameters()), model)
    with torch.no_grad():
        model[2].bias.add_(1.0)
        model[0].bias.add_(1.0)  # not psplus's yet
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(psplus.Error, match=r"'2\.bias' was changed outside"):
        optimizer.step()
    optimizer.publish()
    step_with_ones(optimizer)
    optimizer.close()


def test_a_write_from_outside_is_noticed_across_it(workers: Workers) -> None:
    workers(a_write_from_outside_is_noticed_across_it, 1)


def names_of_added_parameters() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    for source in ({"model": model}, {"named_parameters": iter([("weight", model[2].weight)])}, {}):
        session = psplus.connect(server="always")
        plain = torch.optim.SGD([model[2].weight], lr=1.0)
        optimizer = psplus.wrap(plain, "asp", session=session, **source)
        later = nn.Linear(2, 2)
        model.later = later  # the model's names are those of the moment
        stray = nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [later.weight, stray]})
        names = [p.name for p in optimizer._engine._state.parameters]
        if "model" in source:
            assert names == ["2.weight", "later.weight", "1.1"]
        elif source:
            assert names == ["weight", "1.0", "1.1"]
        else:
            assert names == ["0.0", "1.0", "1.1"]
        del model.later
        optimizer.close()


def test_names(workers: Workers) -> None:
    workers(names_of_added_parameters, 1)


def odd_groups() -> None:
    """Frozen parameters, parameters of no elements, other dtypes, and groups of nothing."""
    first = nn.Parameter(torch.zeros(3))
    optimizer = wrapped([first])
    frozen = nn.Parameter(torch.full((4,), 5.0), requires_grad=False)
    nothing = nn.Parameter(torch.empty(0, 3))
    double = nn.Parameter(torch.full((40_000,), 0.1, dtype=torch.float64))
    half = nn.Parameter(torch.full((5,), 0.25, dtype=torch.bfloat16))
    strided = nn.Parameter(torch.zeros(4, 6).t())
    optimizer.add_param_group({"params": [frozen, nothing]})
    optimizer.add_param_group({"params": []})
    optimizer.add_param_group({"params": [double, half, strided], "lr": 0.5})
    for p in (first, double, half, strided):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(first, torch.full((3,), -1.0))
    assert torch.equal(frozen, torch.full((4,), 5.0))
    assert torch.equal(double, torch.full((40_000,), 0.1, dtype=torch.float64) - 0.5)
    assert torch.equal(half, torch.full((5,), -0.25, dtype=torch.bfloat16))
    assert torch.equal(strided, torch.full((6, 4), -0.5))
    # Unfrozen where it is, as ever.
    frozen.requires_grad_(True)
    frozen.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(frozen, torch.full((4,), 4.0))
    optimizer.close()


def test_odd_groups(workers: Workers) -> None:
    workers(odd_groups, 1)


def refused_groups_change_nothing() -> None:
    model = make_model()
    optimizer = wrapped(list(model[2].parameters()), model)
    step_with_ones(optimizer)
    for params, error, message in (
        ([model[2].weight], ValueError, "more than one parameter group"),
        ([torch.zeros(2, dtype=torch.int64)], psplus.ConfigError, "dtype torch.int64"),
        ([torch.zeros(2, device="meta")], psplus.ConfigError, "on device meta"),
        (nn.LazyLinear(2).parameters(), psplus.ConfigError, "lazy module has no shape"),
    ):
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1
        step_with_ones(optimizer)
    for _ in range(63):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(psplus.ConfigError, match="63 parameter groups after wrapping at most"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    step_with_ones(optimizer)
    assert optimizer.param_groups[63]["params"][0].item() == -1.0
    optimizer.close()


def test_refused_groups_change_nothing(workers: Workers) -> None:
    workers(refused_groups_change_nothing, 1)


def groups_that_differ(meeting: str) -> dict[str, Any]:
    rank = psplus.config.read().rank
    model = make_model()
    plain = torch.optim.SGD([model[2].weight], lr=1.0)
    optimizer = psplus.wrap(plain, "asp", model=model)
    turn = Path(meeting) / "added"
    if rank == 0:
        optimizer.add_param_group({"params": [model[0].weight]})
        turn.touch()
    else:
        wait_for_file(turn)
        for wrong, message in (
            (model[0].bias, r"group 1 of those added.*'0\.bias' on rank 1, but '0\.weight'"),
            (nn.Parameter(torch.zeros(2)), r"'1\.0' on rank 1, but '0\.weight'"),
        ):
            with pytest.raises(psplus.LayoutMismatch, match=message):
                optimizer.add_param_group({"params": [wrong]})
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(psplus.LayoutMismatch, match=r"shape \[2, 2\] on rank 1.*\[7, 6\]"):
            optimizer.add_param_group({"params": [model[0].weight]})
        step_with_ones(optimizer)  # as if nothing had been tried
        model[0].weight = nn.Parameter(torch.zeros(7, 6))
        optimizer.add_param_group({"params": [model[0].weight]})
    step_with_ones(optimizer)
    optimizer.synchronize()
    optimizer.close()
    return {"head": model[2].weight.detach().clone(), "late": model[0].weight.detach().clone()}


def test_groups_that_differ_are_refused_and_named(workers: Workers, clean_job: Path) -> None:
    found = workers(groups_that_differ, 2, meeting=str(clean_job))
    start = make_model()
    for of_rank in found:
        assert_close({"p": of_rank["head"]}, {"p": start[2].weight.detach() - 1.5})
        assert_close({"p": of_rank["late"]}, {"p": start[0].weight.detach() - 1.0})


def one_never_adds(scheme: str) -> dict[str, Any]:
    """Rank 1 goes on without the group; rank 0's steps on it count alone."""
    rank = psplus.config.read().rank
    model = make_model()
    plain = torch.optim.SGD([model[2].weight], lr=1.0)
    optimizer = psplus.wrap(plain, scheme, model=model)
    if rank == 0:
        optimizer.add_param_group({"params": [model[0].weight]})
    for _ in range(10):
        step_with_ones(optimizer)
    optimizer.synchronize()
    optimizer.close()
    return {"head": model[2].weight.detach().clone(), "late": model[0].weight.detach().clone()}


@pytest.mark.parametrize("scheme", ["asp", "bsp", "ps+"])
def test_who_never_adds_the_group_goes_on(workers: Workers, scheme: str) -> None:
    zero, one = workers(one_never_adds, 2, scheme=scheme)
    start = make_model()
    assert torch.equal(zero["head"], one["head"])
    assert torch.equal(one["late"], start[0].weight)
    if scheme != "ps+":  # whose policy may damp a step
        assert_close({"p": zero["head"]}, {"p": start[2].weight.detach() - 10.0})
        assert_close({"p": zero["late"]}, {"p": start[0].weight.detach() - 5.0})


def state_dict_round_trip() -> None:
    model = frozen_backbone()
    session = psplus.connect(server="always")
    optimizer = psplus.wrap(head_optimizer("AdamW", model), "bsp", model=model, session=session)
    for step in range(3):
        gradients_at(model, 0, step)
        optimizer.step()
    unfreeze(model, optimizer)
    for step in range(3, 6):
        gradients_at(model, 0, step)
        optimizer.step()
    saved, values = copy.deepcopy(optimizer.state_dict()), values_of(model)
    assert len(saved["param_groups"]) == 2
    assert len(saved["state"]) == 4

    plain_model = make_model()
    plain_model.load_state_dict(values)
    plain = head_optimizer("AdamW", plain_model)
    unfreeze(plain_model, plain)
    plain.load_state_dict(copy.deepcopy(saved))
    for step in range(6, 9):
        for m, o in ((model, optimizer), (plain_model, plain)):
            gradients_at(m, 0, step)
            o.step()
    assert_close(values_of(model), values_of(plain_model))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])
    optimizer.load_state_dict(saved)
    optimizer.publish()
    for step in range(6, 9):
        gradients_at(model, 0, step)
        optimizer.step()
    assert_close(values_of(model), values_of(plain_model))
    optimizer.close()


def test_state_dict_round_trip(workers: Workers) -> None:
    workers(state_dict_round_trip, 1)
