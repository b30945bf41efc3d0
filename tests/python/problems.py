"""Small training problems whose data differ between ranks and steps."""

from collections.abc import Callable

import torch
from torch import nn

OptimizerMaker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# Every class of torch.optim that takes dense gradients and needs no closure.
OPTIMIZERS: dict[str, OptimizerMaker] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A perceptron 6-7-3; the same for equal seeds."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    torch.set_rng_state(state)
    return model


def loss_at(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Loss on a batch that no other rank or step has."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 6, generator=generator).to(dtype)
    targets = torch.randn(8, 3, generator=generator).to(dtype)
    return (model(inputs) - targets).square().mean()


def gradients_at(model: nn.Module, rank: int, step: int) -> None:
    """Fill ``grad`` of all parameters for that batch."""
    model.zero_grad(set_to_none=True)
    loss_at(model, rank, step).backward()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bsp_reference(make: OptimizerMaker, workers: int, steps: int) -> dict[str, torch.Tensor]:
    """The plain optimizer on the mean of the workers' deltas, written out in float64."""
    models = [make_model() for _ in range(workers)]
    optimizers = [make(list(model.parameters())) for model in models]
    for step in range(steps):
        before = values_of(models[0])
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in before.items()}
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            gradients_at(model, rank, step)
            optimizer.step()
            for name, p in model.named_parameters():
                total[name] += before[name].double() - p.detach().double()
        with torch.no_grad():
            for model in models:
                for name, p in model.named_parameters():
                    p.copy_(before[name].double() - total[name] / workers)
    return values_of(models[0])
