from __future__ import annotations

import pytest
import torch
from torch import nn

from classwise.accelerate.threads import SINGLE_THREAD_OPERATIONS, choose_threads, operations
from classwise.models import MODELS


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Conv2d(3, 8, 3, padding=1, stride=2, groups=1), torch.rand(2, 3, 9, 7)),
        (nn.Conv2d(4, 8, 3, groups=2), torch.rand(1, 4, 6, 6)),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False)), torch.rand(3, 3, 2, 2)),
        (MODELS["digits-cnn"](), torch.rand(2, 1, 8, 8)),
        (MODELS["resnet18"](), torch.rand(1, 3, 32, 32)),
    ],
    ids=["conv", "groups", "linear", "digits-cnn", "resnet18"],
)
def test_operations_equal_torch_flop_counter(model: nn.Module, x: torch.Tensor) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(x)
    assert operations(model, x) == counted.get_total_flops()


def test_counting_does_not_change_the_model() -> None:
    model = MODELS["digits-cnn"]().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    operations(model, torch.rand(1, 1, 8, 8))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.usefixtures("two_threads")
def test_small_models_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, image = MODELS["digits-cnn"](), torch.rand(1, 1, 8, 8)
    enough = -(-SINGLE_THREAD_OPERATIONS // operations(digits, image))
    assert choose_threads(digits, image, 64) == 1
    assert [choose_threads(digits, image, size) for size in (enough - 1, enough)] == [1, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(digits, image, 64) == 2


@pytest.mark.usefixtures("two_threads")
def test_training_restores_the_number_of_threads(tmp_path) -> None:
    import classwise as cw

    seen = []

    class Watching:
        def epoch(self, epoch) -> None:
            seen.append(torch.get_num_threads())

        def close(self) -> None:
            pass

    during = set()

    def watch(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > 10:  # a batch, not a first look at the model
            during.add(torch.get_num_threads())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        cw.train("digits/standard", out=tmp_path / "run", epochs=1, loggers=[Watching()], device="cpu")
    finally:
        handle.remove()
    assert during == {1}
    assert seen == [2]
    assert torch.get_num_threads() == 2
