"""The vLLM plugin's loader of live parameters, with a model whose `load_weights` is like those of vLLM."""

import pytest
import torch
from torch import nn

from instep_engine.direct import DirectLoader

SHAPES = {"q": (4, 6), "k": (2, 6), "o": (6, 4), "norm": (6,), "decay": (3,)}


class Fused(nn.Module):
    """One rank of two: q and k are rows of one parameter, `o` is split by columns, `decay` is transformed."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(3, 6), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)  # padded
        self.decay = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.names = []

    def load_weights(self, weights):
        for name, weight in weights:
            self.names.append(name)
            if name == "q":
                self.qk.data[:2].copy_(weight.narrow(0, 2, 2))
            elif name == "k":
                self.qk.data[2:].copy_(weight.narrow(0, 1, 1))
            elif name == "o":
                self.o.data.copy_(weight.narrow(1, 2, 2))
            elif name == "norm":
                self.norm.data[:6].copy_(weight)
                self.norm.data[6:].fill_(0)
            else:
                self.decay.data.copy_(-weight.exp())


def weights(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_sessions_write_what_load_weights_would(dtype):
    live, loader = Fused(), None
    addresses = [p.data_ptr() for p in live.parameters()]
    loader = DirectLoader(live)
    for seed in range(3):
        new, expected = weights(seed, dtype), Fused()
        expected.load_weights(new.items())
        loader.begin()
        for part in (["q", "o"], ["k", "norm"], ["decay"]):  # in buckets
            loader.load({name: new[name] for name in part})
        for name, parameter in expected.named_parameters():
            assert torch.equal(live.get_parameter(name), parameter), name
    assert live.names == ["q", "o", "k", "norm", "decay", "decay", "decay"]  # which is no plain copy
    assert [p.data_ptr() for p in live.parameters()] == addresses


def test_what_was_written_is_counted_in_every_session():
    loader = DirectLoader(Fused())
    for seed in range(2):
        loader.begin()
        loader.load({name: t for name, t in weights(seed).items() if name != "k"})
        assert loader._written == {"qk": 12, "o": 12, "norm": 6, "decay": 3}
