"""Acceptance cases of the wrapper that need two workers; each group shares a pair of processes."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import gradients_at, loss_at, make_model, values_of
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import psplus

Workers = Callable[..., list[Any]]


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def my_rank() -> int:
    return psplus.config.read().rank


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def cases(names: list[str]) -> dict[str, Any]:
    """Runs cases of this file one after the other; each wraps an optimizer of its own."""
    return {name: globals()[name](my_rank()) for name in names}


def same_everywhere(found: list[Any]) -> None:
    for of_rank in found[1:]:
        assert of_rank.keys() == found[0].keys()
        for name, value in of_rank.items():
            assert torch.equal(value, found[0][name]), name


def c04_requires_grad_flipped(rank: int) -> dict[str, Any]:
    nets = [make_model(1), make_model(2)]
    both = nn.ModuleList(nets)
    optimizer = psplus.wrap(sgd(both, weight_decay=0.1), "bsp", model=both)
    for phase in range(10):
        active, idle = nets[phase % 2], nets[1 - phase % 2]
        active.requires_grad_(True)
        idle.requires_grad_(False)
        before = values_of(idle)
        both.zero_grad(set_to_none=True)
        loss_at(active, rank, phase).backward()
        optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in idle.named_parameters())
        assert all(p.grad is None for p in idle.parameters())
    optimizer.close()
    return values_of(both)


def c06_rank_0_loads_a_checkpoint(rank: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
    plain = sgd(model, lr=0.1, momentum=0.5)
    if rank == 0:
        plain.param_groups[0].update(lr=2e-11, weight_decay=0.25, momentum=0.75)
        for p in model.parameters():
            plain.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
        model[1].running_mean.fill_(4.0)
        model[1].num_batches_tracked.fill_(12)
    optimizer = psplus.wrap(plain, "asp", model=model)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (2e-11, 0.25, 0.75)
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.full_like(p, 3.0))
    assert model[1].running_mean.tolist() == [4.0] * 7
    assert model[1].num_batches_tracked.item() == 12
    optimizer.close()
    return values_of(model)


def c07_accumulation_with_a_left_over(rank: int) -> dict[str, Any]:
    model, twin = make_model(), make_model()
    optimizer = psplus.wrap(sgd(model), "bsp", model=model)
    plain = sgd(twin)
    steps = 0
    for _ in range(3):
        for i in range(20):
            for net in (model, twin):
                loss_at(net, 0, i).backward()  # the same data on both ranks: means are the values
            if (i + 1) % 8 == 0:
                steps += 1
                for net, opt in ((model, optimizer), (twin, plain)):
                    opt.step()
                    net.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)
    assert optimizer.stats.pushes == steps == 6
    optimizer.close()
    return values_of(model)


def c09_inf_on_one_rank_only(rank: int) -> dict[str, Any]:
    model = make_model()
    optimizer = psplus.wrap(sgd(model), "asp", model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_at(model, rank, step)
        if (rank, step) == (1, 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (128.0 if rank == 1 else 256.0)
    assert optimizer.stats.pushes == (5 if rank == 1 else 6)
    optimizer.synchronize()
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.close()
    return values_of(model)


def c14_plateau_on_one_rank(rank: int) -> dict[str, Any]:
    """Each push uses the learning rate of the worker that made it."""
    w = zeros(3)
    optimizer = psplus.wrap(torch.optim.SGD([w], lr=1.0), "bsp")
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    expected = 0.0
    for step in range(4):
        w.grad = torch.ones(3)
        optimizer.step()
        rank_0_lr = 0.5 ** max(0, step - 1)
        expected -= (rank_0_lr + 1.0) / 2
        assert w.tolist() == [expected] * 3
        scheduler.step(1.0 if rank == 0 else -float(step))  # only rank 0 sees a plateau
    optimizer.close()
    return {"w": w.detach().clone()}


def c16_hyper_parameters_per_group(rank: int) -> dict[str, Any]:
    decayed, plain = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.full((3,), 2.0))
    groups = [
        {"params": [decayed], "weight_decay": 0.5, "lr": 0.5},
        {"params": [plain], "weight_decay": 0.0, "lr": 0.25},
    ]
    optimizer = psplus.wrap(torch.optim.SGD(groups, lr=9.0), "bsp")
    for p in (decayed, plain):
        p.grad = torch.full_like(p, float(1 + rank))
    optimizer.step()
    assert decayed.tolist() == [2.0 - 0.5 * (1.5 + 0.5 * 2.0)] * 4
    assert plain.tolist() == [2.0 - 0.25 * 1.5] * 3
    optimizer.close()
    return {"decayed": decayed.detach().clone(), "plain": plain.detach().clone()}


def c18_unfreezing_during_training(rank: int) -> dict[str, Any]:
    model = make_model()
    model[2].requires_grad_(False)
    optimizer = psplus.wrap(sgd(model, weight_decay=0.1), "bsp", model=model)
    frozen = values_of(model[2])
    for step in range(12):
        if step == 5 + 2 * rank:  # rank 1 unfreezes two steps later
            model[2].requires_grad_(True)
        model.zero_grad(set_to_none=True)
        loss_at(model, rank, step).backward()
        optimizer.step()
        moved = not torch.equal(model[2].weight, frozen["weight"])
        assert moved == (step >= 5), step
    optimizer.close()
    return values_of(model)


def c33_empty_parameters(rank: int) -> dict[str, Any]:
    model = nn.ModuleDict({"wide": nn.Linear(3, 0), "used": nn.Linear(3, 1)})
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    optimizer = psplus.wrap(sgd(model), "bsp", model=model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, 3)
        (model["used"](x).sum() + model["wide"](x).sum() + model.none.sum()).backward()
        optimizer.step()
    optimizer.close()
    return values_of(model)


def c29_c30_c31_layouts_and_dtypes(rank: int) -> dict[str, Any]:
    """Gradients are 1 + rank, so each of two BSP steps moves by 1.5 times the learning rate."""
    model = nn.Module()
    shape = (4, 3, 2, 2)
    for dtype in ("float32", "float64", "bfloat16", "float16", "complex64", "complex128"):
        start = torch.arange(48).reshape(shape).to(getattr(torch, dtype))
        start = start.contiguous(memory_format=torch.channels_last)
        model.register_parameter(f"of_{dtype}", nn.Parameter(start))
    strided = torch.arange(12.0).reshape(3, 4).t()
    model.register_parameter("transposed", nn.Parameter(strided))
    model.register_parameter("sliced", nn.Parameter(torch.arange(20.0).reshape(4, 5)[:, :3]))
    before = values_of(model)
    optimizer = psplus.wrap(sgd(model, lr=1.0), "bsp", model=model)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)
            if p.is_complex():
                p.grad = p.grad * (1 + 2j)
        optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 + 2j if p.is_complex() else 1.0
        assert torch.equal(p.detach(), before[name] - 3.0 * factor), name
        assert p.stride() == before[name].stride() or name == "sliced"
    assert model.of_float32.is_contiguous(memory_format=torch.channels_last)
    optimizer.close()
    return values_of(model)


def c37_different_branches(rank: int) -> dict[str, Any]:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    optimizer = psplus.wrap(sgd(model, lr=0.5, momentum=0.9, weight_decay=0.1), "bsp", model=model)
    twin, plain_of = {}, {}
    for branch in "ab":
        twin[branch] = nn.Linear(2, 1)
        twin[branch].load_state_dict(model[branch].state_dict())
        plain_of[branch] = sgd(twin[branch], lr=0.25, momentum=0.9, weight_decay=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model["ab"[rank]](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for branch in "ab":  # the other rank pushes nothing for it: delta / 2
            plain_of[branch].zero_grad()
            twin[branch](torch.ones(1, 2)).sum().backward()
            plain_of[branch].step()
            for p, q in zip(model[branch].parameters(), twin[branch].parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    optimizer.close()
    return values_of(model)


def c40_batch_norm_agrees_after_synchronize(rank: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = psplus.wrap(sgd(model), "ps+", model=model)
    for step in range(30):
        gradients_at(model, rank, step)
        optimizer.step()
    optimizer.synchronize()
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model[1].num_batches_tracked.item() == 30
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.arange(24.0).reshape(4, 6)
    output = model.eval()(batch).detach()
    twin = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval()
    twin.load_state_dict(saved)
    assert torch.equal(twin(batch), output)
    optimizer.close()
    return {"output": output, **saved}


def c41_torch_compile(rank: int) -> dict[str, Any]:
    model, twin = make_model(), make_model()
    optimizer = psplus.wrap(sgd(model), "bsp", model=model)
    plain = sgd(twin)

    @torch.compile(backend="aot_eager")
    def forward_and_backward(step: int) -> None:
        loss_at(model, 0, step).backward()

    compiled = torch.compile(model, backend="aot_eager")
    for step in range(6):
        for net, opt in ((model, optimizer), (twin, plain)):
            opt.zero_grad()
            if net is twin:
                loss_at(twin, 0, step).backward()
            elif step % 2:
                forward_and_backward(step)
            else:
                loss_at(compiled, 0, step).backward()
            opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    optimizer.synchronize()
    assert optimizer.step_vector.tolist() == [6, 6]
    optimizer.close()
    return values_of(model)


def c79_state_dict_on_one_rank(rank: int) -> dict[str, Any]:
    model = make_model()
    optimizer = psplus.wrap(sgd(model, momentum=0.9), "bsp", model=model)
    gradients_at(model, 0, 0)
    optimizer.step()
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 4
    optimizer.synchronize()
    optimizer.close()
    return values_of(model)


def c80_no_traffic_while_accumulating(rank: int) -> dict[str, Any]:
    model = make_model()
    optimizer = psplus.wrap(sgd(model), "ps+", model=model)
    before = optimizer.stats
    for step in range(40):
        loss_at(model, rank, step).backward()
    assert optimizer.stats.bytes_pushed == before.bytes_pushed
    assert optimizer.stats.bytes_pulled == before.bytes_pulled
    optimizer.step()
    assert optimizer.stats.pushes == 1
    optimizer.synchronize()
    optimizer.close()
    return values_of(model)


def c62_nan_gradients(rank: int) -> dict[str, Any]:
    model = make_model()
    optimizer = psplus.wrap(sgd(model), "asp", model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 11):
            gradients_at(model, rank, step)
            if (rank, step) == (1, 5):
                model[0].weight.grad[2, 2] = float("nan")
            optimizer.step()
    texts = [str(w.message) for w in caught]
    assert len(texts) == rank
    if rank == 1:
        assert "rank 1 skipped step 5: the gradient of parameter '0.weight'" in texts[0]
    assert optimizer.stats.skipped_steps == rank
    assert optimizer.stats.pushes == 10
    optimizer.synchronize()
    assert optimizer.step_vector.tolist() == [10, 10]
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.close()
    return values_of(model)


GROUPS = [
    [name for name in list(globals()) if name.startswith("c") and name[1].isdigit()][half::2]
    for half in range(2)
]


@pytest.mark.parametrize(
    "names", GROUPS, ids=lambda names: "_".join(n.split("_")[0] for n in names)
)
def test_cases_of_two_workers(workers: Workers, names: list[str]) -> None:
    found = workers(cases, 2, names=names)
    for name in names:
        same_everywhere([of_rank[name] for of_rank in found])


def decay() -> list[float]:
    w = zeros(1)
    session = psplus.connect(server="always")
    optimizer = psplus.wrap(torch.optim.SGD([w], lr=1.0), "asp", session=session)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    path = []
    for _ in range(10):
        w.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        path.append(w.item())
    optimizer.param_groups[0]["lr"] = 0.0  # C12: nothing moves any more
    for _ in range(5):
        w.grad = torch.ones(1)
        optimizer.step()
    path.append(w.item())
    return path


def test_c12_c13_the_learning_rate_acts_at_the_push(workers: Workers) -> None:
    (path,) = workers(decay, 1)
    expected = [-(2 - 0.5**k) for k in range(10)]
    assert path == [*expected, expected[-1]]


def forward_then_others_push() -> dict[str, Any]:
    """Rank 0 pushes 50 updates between rank 1's forward and backward."""
    rank = my_rank()
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = psplus.wrap(sgd(model), "ps+", model=model)
    actual = -1
    if rank == 1:
        x = torch.randn(8, 6)
        first, second = model(x), model(x * 2)
        seen = values_of(model)
        while int(optimizer.step_vector[0]) < 50:
            time.sleep(0.01)
        (first.square().sum() + second.sum()).backward()
        assert all(torch.equal(p, seen[name]) for name, p in model.named_parameters())
        optimizer.step()
        optimizer.pull()
        actual = optimizer._engine._stream.peek().actual
    else:
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
    optimizer.synchronize()
    optimizer.close()
    return {"actual": actual, "values": values_of(model)}


def test_c38_c39_backward_uses_the_weights_of_its_forward(workers: Workers) -> None:
    found = workers(forward_then_others_push, 2)
    assert found[1]["actual"] >= 50
    same_everywhere([of_rank["values"] for of_rank in found])
