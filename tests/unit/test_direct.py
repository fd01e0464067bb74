"""The vLLM plugin's loader of live parameters, with a model whose `load_weights` is like those of vLLM."""

import pytest
import torch
from torch import nn

from instep_engine.direct import DirectLoader
from instep_engine.manifest import WeightMismatch
from instep_engine.memory import CannotShare, Recorder, check_record

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


def test_layers_for_images_may_stay_as_they_are():
    live = nn.ModuleDict({"visual": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    live.load_weights = lambda weights: [live.get_parameter(name).data.copy_(weight) for name, weight in weights]
    loader, body = DirectLoader(live), {"body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}
    loader.begin()
    loader.load(body)
    loader.check_complete(lambda layer: False)
    loader.begin()
    loader.load({"body.bias": torch.ones(2)})
    with pytest.raises(WeightMismatch, match="body was not delivered whole"):
        loader.check_complete(lambda layer: False)


class Spoiler(Fused):
    """It adds 1 to a norm, in the memory that it is given, as SGLang's Gemma does."""

    def load_weights(self, weights):
        super().load_weights((name, weight.add_(1) if name == "norm" else weight) for name, weight in weights)


def test_a_model_that_changes_what_it_is_given_is_refused():
    loader = DirectLoader(Spoiler())
    loader.begin()
    with pytest.raises(ValueError, match="norm: this engine changes it"):
        loader.load(weights(0))
    model = Spoiler()
    recorder = Recorder(model.parameters())
    with recorder:
        model.load_weights(recorder.seen((name, t) for name, t in weights(0).items() if name != "decay"))
    with pytest.raises(CannotShare, match="computes with other values"):
        check_record(recorder, model, nn.Embedding)


class Derived(Fused):
    """Its buffer is derived from a norm by an operation with `out`, as in SGLang's GemmaRMSNorm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("more", torch.zeros(8))

    def load_weights(self, weights):
        super().load_weights(weights)
        torch.add(self.norm.data, 1.0, out=self.more)


def test_a_value_that_the_model_derives_follows_each_session():
    live, loader = Derived(), None
    loader = DirectLoader(live)
    for seed in range(3):
        loader.begin()
        loader.load(weights(seed))
        assert torch.equal(live.more[:6], weights(seed)["norm"] + 1)
