"""The wrapper as an optimizer: names, refusals, and torch's own contract."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import gradients_at, loss_at, make_model, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import psplus
from psplus.optim.names import name_parameters


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def names(optimizer: torch.optim.Optimizer, **source: Any) -> list[str]:
    source = {"model": None, "named_parameters": None, **source}
    return [p.name for p in name_parameters(optimizer, **source)]


def test_where_names_come_from() -> None:
    model = make_model()
    parts = [{"params": [model[0].weight]}, {"params": [model[2].bias, model[0].bias]}]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    assert names(optimizer) == ["0.0", "1.0", "1.1"]
    assert names(optimizer, model=model) == ["0.weight", "2.bias", "0.bias"]
    given = {"a": model[0].weight, "b": model[0].bias, "c": model[2].bias}
    assert names(optimizer, named_parameters=given) == ["a", "c", "b"]
    assert names(optimizer, model=model, named_parameters=given.items()) == ["a", "c", "b"]


def test_tied_tensors_go_by_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert names(sgd(model), model=model) == ["0.weight", "0.bias", "1.bias"]


def test_c02_names_for_only_part_of_the_parameters() -> None:
    model = make_model()
    named = [("w", model[0].weight), ("b", model[0].bias)]
    with pytest.raises(psplus.ConfigError) as error:
        psplus.wrap(sgd(model), named_parameters=named)
    assert isinstance(error.value, ValueError)
    assert "0.2 of shape (3, 7)" in str(error.value)
    assert "0.3 of shape (3,)" in str(error.value)


def test_c03_duplicate_names() -> None:
    convolutions = [nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3)]
    named = [pair for c in convolutions for pair in c.named_parameters()]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    with pytest.raises(psplus.ConfigError, match="two parameters are named 'weight'"):
        psplus.wrap(optimizer, named_parameters=named)


def test_c05_frozen_backbone_with_names_of_all_parameters() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    frozen = values_of(model[0])
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    wrapped = psplus.wrap(optimizer, named_parameters=model.named_parameters())
    head = values_of(model[2])
    gradients_at(model, 0, 0)
    wrapped.step()
    assert all(torch.equal(p, frozen[name]) for name, p in model[0].named_parameters())
    assert not any(torch.equal(p, head[name]) for name, p in model[2].named_parameters())


def refused_models() -> list[Any]:
    frozen = make_model().requires_grad_(False)
    lazy = nn.LazyLinear(3)
    return [
        pytest.param(frozen, "nothing to train", id="c34_nothing_to_train"),
        pytest.param(lazy, "'weight' of a lazy module.*forward pass", id="c35_lazy"),
    ]


@pytest.mark.parametrize(("model", "message"), refused_models())
def test_models_that_are_refused_everywhere(model: nn.Module, message: str) -> None:
    with pytest.raises(psplus.ConfigError, match=message):
        psplus.wrap(sgd(model), model=model)


@pytest.fixture
def lone_group(clean_job: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{clean_job / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("named", [True, False], ids=["model", "no-model"])
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.usefixtures("lone_group")
def test_fsdp_is_refused_with_a_hint(original: bool, named: bool) -> None:
    model = FullyShardedDataParallel(
        make_model(), use_orig_params=original, device_id=torch.device("cpu")
    )
    with pytest.raises(psplus.ConfigError, match=r"sharded by FSDP.*plain module"):
        psplus.wrap(sgd(model), model=model if named else None)


@pytest.mark.parametrize("named", [True, False], ids=["model", "no-model"])
@pytest.mark.usefixtures("lone_group")
def test_fsdp2_is_refused_with_a_hint(named: bool) -> None:
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(psplus.ConfigError, match=r"sharded by FSDP|is a DTensor"):
        psplus.wrap(sgd(model), model=model if named else None)


@pytest.mark.usefixtures("lone_group")
def test_dtensors_are_refused_with_a_hint() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = distribute_module(make_model(), mesh)
    with pytest.raises(psplus.ConfigError, match=r"'0.weight' is a DTensor.*plain tensors"):
        psplus.wrap(sgd(model), model=model)


@pytest.mark.usefixtures("lone_group")
def test_ddp_is_refused_with_a_hint() -> None:
    model = DistributedDataParallel(make_model())
    with pytest.raises(psplus.ConfigError, match="pass the plain module"):
        psplus.wrap(sgd(model), model=model)
    # Neither knows that there is a wrapper.
    for source in ({"model": model.module}, {}):
        with pytest.raises(psplus.ConfigError, match="pass the plain module"):
            psplus.wrap(sgd(model), **source)
    psplus.wrap(sgd(other := make_model()), model=other)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, device="meta"), "'w' is on device meta.*CPU"),
        (torch.zeros(3, dtype=torch.float8_e5m2), "'w' has dtype torch.float8_e5m2.*bfloat16"),
        (torch.zeros(1).expand(4), r"parameter 'w' is expanded: its shape is \(4,\).*clone\(\)"),
        (torch.zeros(2, 1).expand(2, 3), r"'w' is expanded: its shape is \(2, 3\)"),
    ],
    ids=["meta", "float8", "expanded", "expanded within"],
)
def test_parameters_that_no_server_takes(tensor: torch.Tensor, message: str) -> None:
    session = psplus.connect(server="always")
    parameter = nn.Parameter(tensor)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(psplus.ConfigError, match=message):
        psplus.wrap(optimizer, named_parameters=[("w", parameter)], session=session)


def test_expanded_buffers_are_named() -> None:
    session = psplus.connect(server="always")
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 1).expand(1, 3), persistent=False)
    with pytest.raises(psplus.ConfigError, match=r"buffer 'mask' is expanded: .*clone\(\)"):
        psplus.wrap(sgd(model), model=model, session=session)


def test_integer_parameters_are_named() -> None:
    session = psplus.connect(server="always")
    counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight, counts], lr=0.1)
    with pytest.raises(psplus.ConfigError, match=r"'0\.1' has dtype torch.int64"):
        psplus.wrap(optimizer, session=session)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "PS+"}, r"has 'bsp', .*; did you mean 'ps\+'\?"),
        ({"scheme": "psplus"}, r"did you mean 'ps\+'\?"),
        ({"scheme": "sync"}, r"has 'bsp', 'ssp', 'asp', 'ps\+'$"),
        ({"placement": "server"}, r"scheme 'ps\+' continues with a worker's own update"),
        ({"pull": "jit"}, "pull='jit' is not in this version"),
        ({"nonfinite": "ignore"}, "'skip', 'raise' or 'allow'"),
        ({"outside_writes": "allow"}, "'raise' or 'ignore'"),
        ({"timeout": -1.0}, "timeout must be"),
        ({"straggler_timeout": float("inf")}, "straggler_timeout must be"),
        ({"timeout": 1e300}, "timeout must be"),
        ({"staleness_bound": 2**70}, "staleness_bound must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(psplus.ConfigError, match=message):
        psplus.wrap(sgd(make_model()), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "net"}, r"model must be a torch.nn.Module, got 'net'"),
        ({"session": "mine"}, r"session must come from psplus.connect\(\), got 'mine'"),
        ({"named_parameters": [1, 2]}, "pairs of a name and a tensor.*got 1"),
        ({"named_parameters": 3}, "pairs of a name and a tensor.*got 3"),
    ],
)
def test_wrong_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        psplus.wrap(sgd(make_model()), **arguments)


@pytest.mark.parametrize("timeout", [-1, "x", None])
def test_wrong_timeouts_of_close_are_refused(timeout: Any) -> None:
    optimizer = psplus.wrap(sgd(make_model()))
    with pytest.raises(psplus.ConfigError, match="timeout must be a positive number"):
        optimizer.close(timeout)
    optimizer.close()


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"like those of torch\.optim"):
        psplus.wrap(make_model())  # type: ignore[arg-type]
    with pytest.raises(psplus.ConfigError, match="wrapped already"):
        psplus.wrap(psplus.wrap(sgd(make_model())))


class Lookahead(torch.optim.Optimizer):
    """Delegates its attributes, as many wrappers around optimizers do."""

    def __init__(self, inner: torch.optim.Optimizer, every: int) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            with torch.no_grad():
                for p, slow in zip(fast, self.slow, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return loss


def test_c01_an_optimizer_that_delegates_its_attributes() -> None:
    results = []
    for wrapping in (psplus.wrap, lambda o: o):
        model = make_model()
        inner = Lookahead(torch.optim.RAdam(model.parameters(), lr=0.05), every=3)
        optimizer = wrapping(inner)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        for step in range(20):
            gradients_at(model, 0, step)
            optimizer.step()
        results.append(values_of(model))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("make", [StepLR, OneCycleLR, ReduceLROnPlateau])
def test_c11_schedulers_without_false_warnings(make: Any, before: bool) -> None:
    arguments: dict[Any, Any] = {
        StepLR: {"step_size": 1, "gamma": 0.5},
        OneCycleLR: {"max_lr": 0.5, "total_steps": 10},
        ReduceLROnPlateau: {"patience": 0, "factor": 0.5},
    }
    model = make_model()
    inner = sgd(model, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            scheduler = make(inner, **arguments[make])
            optimizer = psplus.wrap(inner)
        else:
            optimizer = psplus.wrap(inner)
            scheduler = make(optimizer, **arguments[make])
        for epoch in range(3):
            gradients_at(model, 0, epoch)
            optimizer.step()
            scheduler.step(*([1.0] if make is ReduceLROnPlateau else []))
            assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_a_skipped_first_step_makes_no_scheduler_complain() -> None:
    for before in (True, False):
        model = make_model()
        inner = sgd(model)
        optimizer = psplus.wrap(inner)
        scheduler = StepLR(inner if before else optimizer, 1)
        gradients_at(model, 0, 0)
        model[0].weight.grad[0, 0] = float("inf")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            scheduler.step()
        assert [w.category for w in caught] == [RuntimeWarning]


def test_hooks_run_once_and_see_the_right_optimizer() -> None:
    model = make_model()
    inner = sgd(model)
    optimizer = psplus.wrap(inner)
    seen: list[tuple[str, Any]] = []

    def note(what: str) -> Any:
        return lambda opt, *_: seen.append((what, opt))

    inner.register_step_post_hook(note("inner post"))
    optimizer.register_step_pre_hook(note("pre"))
    handle = optimizer.register_step_post_hook(note("post"))
    everywhere = register_optimizer_step_post_hook(note("global"))
    optimizer.register_state_dict_post_hook(lambda opt, d: {**d, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, d: {k: v for k, v in d.items() if k != "extra"}
    )
    gradients_at(model, 0, 0)
    optimizer.step()
    everywhere.remove()
    handle.remove()
    optimizer.step()
    expected = [("pre", optimizer), ("inner post", inner), ("global", inner), ("post", optimizer)]
    assert seen == [*expected, ("pre", optimizer), ("inner post", inner)]
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)


def test_state_dicts_are_those_of_the_plain_optimizer() -> None:
    model, twin = make_model(), make_model()
    optimizer = psplus.wrap(torch.optim.Adam(model.parameters(), lr=0.1))
    gradients_at(model, 0, 0)
    optimizer.step()
    plain = torch.optim.Adam(twin.parameters(), lr=0.7)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state is optimizer._inner.state


def test_c15_a_group_without_parameters() -> None:
    def make() -> tuple[nn.Module, psplus.DistributedOptimizer]:
        model = make_model()
        groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.3}]
        return model, psplus.wrap(torch.optim.AdamW(groups, lr=0.1))

    model, optimizer = make()
    gradients_at(model, 0, 0)
    optimizer.step()
    _, fresh = make()
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[1]["betas"] == (0.9, 0.999)
    fresh.step()


def test_c10_clipping_before_the_step() -> None:
    w = nn.Parameter(torch.tensor([0.5]))
    optimizer = psplus.wrap(torch.optim.SGD([w], lr=0.1))
    (w * 10 - 1).square().sum().backward()
    nn.utils.clip_grad_norm_([w], 0.1)
    optimizer.step()
    assert 0 < abs(w.item() - 0.5) <= 0.01 + 1e-7


@pytest.mark.parametrize("fused", [False, True])
def test_c08_grad_scaler_needs_no_special_call(fused: bool) -> None:
    model = make_model()
    optimizer = psplus.wrap(sgd(model, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = values_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_at(model, 0, 0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * gradients[name])
        assert gradients[name].abs().max() < 10  # not 1024 times as large

    model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.stats.step == 1
