"""The optimizers of the `hf` backend: moments in 8 bits, and in host memory."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.training.hf import optimizer as module
from instep.training.hf.eight_bits import code_tables, looked_up
from instep.training.hf.optimizer import BLOCK, EIGHT_BITS, PiecewiseAdamW
from tests.distributed.hf_runs import make_backend, make_checkpoint, train, weights_of

OPTIONS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)


def piecewise(p: nn.Parameter, eight_bits: bool) -> PiecewiseAdamW:
    return PiecewiseAdamW([{"params": [p], "weight_decay": 0.1}], OPTIONS, eight_bits=eight_bits, offload=False)


def oracle_codes(numbers: list[float], signed: bool) -> list[float]:
    """What a block of numbers is after it was written in 8 bits, from the paper's description, number by number.

    A code has a sign bit (of a second moment another bit of fraction), a run of zeros that is the power of ten, and a
    fraction that lies evenly between 0.1 and 1.
    """
    values = [0.0, 1.0]
    for zeros in range(7):
        count = 2 ** (6 - zeros) * (1 if signed else 2)
        for i in range(count):
            fraction = 0.1 + 0.9 * (i + 0.5) / count
            values += [fraction / 10**zeros] + ([-fraction / 10**zeros] if signed else [])
    scale = max(numbers, key=abs)
    if scale == 0:
        return [0.0] * len(numbers)
    smallest = min(v for v in values if v > 0)
    out = []
    for x in numbers:
        nearest = min(values, key=lambda v: abs(v - x / scale))
        out.append(scale * (smallest if not signed and x > 0 and nearest == 0 else nearest))
    return out


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_equal_an_oracle_and_stay_when_written_again(signed):
    name = module.MOMENTS[0 if signed else 1]
    g = torch.Generator().manual_seed(1)
    numbers = torch.randn(4 * BLOCK, generator=g) * 10 ** torch.empty(4 * BLOCK).uniform_(-7, 0, generator=g)
    numbers[BLOCK : 2 * BLOCK] = 0
    numbers = numbers if signed else numbers.square()
    stored = {name: torch.zeros(len(numbers), dtype=torch.uint8), f"{name}_scale": torch.zeros(4)}
    module._pack(stored, name, numbers)
    read = module._unpack(stored, name)
    expected = [x for block in numbers.split(BLOCK) for x in oracle_codes(block.tolist(), signed)]
    torch.testing.assert_close(read, torch.tensor(expected), rtol=1e-6, atol=0)
    assert ((read > 0) == (numbers > 0)).all() or signed
    again = {key: tensor.clone() for key, tensor in stored.items()}
    module._pack(again, name, read)
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_that_are_looked_up_are_those_of_a_search(signed):
    codes = code_tables(signed, torch.device("cpu"))
    bounds = codes.bounds[:-1]
    floats = torch.arange(-(2**31), 2**31, 4001).to(torch.int32).view(torch.float32)
    near = torch.cat([bounds, -bounds, codes.values, -codes.values]).view(torch.int32)
    near = torch.cat([near + ulps for ulps in range(-2, 3)]).view(torch.float32)
    numbers = torch.cat([floats[floats.abs() <= 1], near, torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan])])
    assert len(numbers) > 10**6 / 2
    assert torch.equal(looked_up(numbers, codes), torch.bucketize(numbers, bounds, out_int32=True))
    assert (torch.bincount(bounds.view(torch.int32) >> 16 & 0xFFFF) <= 1).all()


@pytest.fixture
def traced(monkeypatch):
    """The kernel is traced, whatever a worker in this process has switched off."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernel = torch.compile(module._kernel, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(module, "_compiled", lambda: kernel)
    with torch.compiler.set_stance("default"):
        yield


def test_the_kernel_that_is_compiled_on_a_gpu_takes_the_same_steps(traced, monkeypatch):
    """Here it runs uncompiled, but is traced as on a GPU: once, whatever the sizes and learning rates."""
    monkeypatch.setattr(module, "_PIECE", 2**13)
    ends = []
    for compiles in (False, True):
        g = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=g)) for shape in ((70, 1000), (256, 256), (41, 100), (9,))]
        parts = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
        optimizer = PiecewiseAdamW(parts, OPTIONS, eight_bits=True, offload=False)
        assert not optimizer.compiles
        optimizer.compiles = compiles
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            for p in params:
                p.grad = torch.randn(p.shape, generator=g)
            optimizer.step()
        ends.append([(p.detach(), optimizer.state[p]) for p in params])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for (weight, state), (other, theirs) in zip(*ends, strict=True):
        assert (weight - other).abs().mean() < 1e-6 and (weight - other).abs().max() < 1e-4
        for name in module.MOMENTS:  # rounding may send a number to the next code
            assert (state[name] == theirs[name]).float().mean() > 0.999


@pytest.mark.parametrize("compiles", [False, True])
def test_a_clip_is_a_factor_of_the_gradients_and_small_parameters_are_stepped_together(traced, monkeypatch, compiles):
    calls, adamw = [], module.adamw
    monkeypatch.setattr(
        module, "adamw", lambda params, *args, **kw: calls.append(len(params)) or adamw(params, *args, **kw)
    )
    ends = []
    for inside in (True, False):
        g = torch.Generator().manual_seed(0)
        shapes = ((70, 1000), (256, 256), (41, 100), (9,), (12,), (30, 30))
        params = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
        parts = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]
        optimizer = PiecewiseAdamW(parts, {**OPTIONS, "lr": 1e-2}, eight_bits=True, offload=False)
        optimizer.compiles = compiles
        for factor in (0.3, 1.0, 0.7):
            for p in params[:-1]:  # the last has no gradient
                p.grad = torch.randn(p.shape, generator=g) * (1.0 if inside else factor)
            optimizer.clip = factor if inside else 1.0
            calls.clear()
            optimizer.step()
            assert calls[0] == 2 and set(calls[1:]) <= {1}
            assert len(calls) == 1 + (2 if compiles else 3), "the ends of two that have no whole blocks there"
        steps = [float(optimizer.state[p]["step"]) for p in params]
        assert steps == [3.0] * 5 + [0.0]
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("compiles", [False, True])
def test_parameters_with_neighbouring_gradients_are_stepped_in_one_call(traced, monkeypatch, compiles):
    calls, step = [], module._step
    monkeypatch.setattr(module, "_step", lambda piece, *args: calls.append(len(piece.weight)) or step(piece, *args))
    sizes = (32 * BLOCK, 16 * BLOCK, 20 * BLOCK + 10, 16 * BLOCK, 32 * BLOCK, 9, 64 * BLOCK)  # 9 has no 8 bits
    monkeypatch.setattr(module, "_PIECE", 24 * BLOCK)
    ends = []
    for joins in (True, False):
        g = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=g)) for size in sizes]
        parts = [
            {"params": [*reversed(params[:-1])], "weight_decay": 0.1},
            {"params": params[-1:], "weight_decay": 0.0},
        ]
        optimizer = PiecewiseAdamW(parts, OPTIONS, eight_bits=True, offload=False)
        optimizer.compiles = compiles
        gradients = torch.empty(sum(sizes)).split(sizes)
        if joins:
            optimizer.join([*zip(params, gradients, strict=True)])
        for i in range(3):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.copy_(torch.randn(len(p), generator=g))
            params[3].grad = params[3].grad.clone() if i == 1 else params[3].grad  # no neighbour in this step
            calls.clear()
            optimizer.step()
            if joins and compiles:
                rest = [16, 32] if i == 1 else [48]
                assert sorted(calls) == sorted([68 * BLOCK + 10, 64 * BLOCK, *(blocks * BLOCK for blocks in rest)])
            for p in params[:2]:  # as if a checkpoint was read
                optimizer.set_moment(p, "exp_avg", torch.randn(len(p), generator=torch.Generator().manual_seed(i)))
        ends.append([*params, *(t for p in params for t in optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))


def test_pieces_equal_a_whole_step(monkeypatch):
    torch.manual_seed(0)
    start = torch.randn(70, 100)
    ends = []
    for size in (2**23, 2 * BLOCK):
        monkeypatch.setattr(module, "_PIECE", size)
        for eight_bits in (False, True):
            p = nn.Parameter(start.clone())
            optimizer = piecewise(p, eight_bits)
            for step in range(3):
                p.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step))
                optimizer.step()
            ends.append(p.detach())
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])
    p = nn.Parameter(start.clone())
    plain = torch.optim.AdamW([p], weight_decay=0.1, **OPTIONS)
    for step in range(3):
        p.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step))
        plain.step()
    assert torch.equal(ends[0], p.detach())
    moved, moved_8 = ends[0] - start, ends[1] - start
    assert 1e-4 < (moved_8 - moved).norm() / moved.norm() < 0.05


def test_8_bits_take_a_quarter_of_the_memory_and_find_the_minimum():
    torch.manual_seed(0)
    target = torch.randn(100, 100)
    p = nn.Parameter(torch.zeros(100, 100))
    optimizer = piecewise(p, True)
    state = optimizer.state[p]
    assert sum(t.nbytes for t in state.values()) < 2.1 * p.numel()
    losses = []
    for _ in range(400):
        loss = (p - target).square().mean() * 5000
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.05 * losses[0] and math.isfinite(losses[-1])


def _train_rank(path, tp, options, folder, load):
    backend = make_backend(path, load=not load, tensor_model_parallel_size=tp, **options)
    if load:
        backend.load(folder)
        return train(backend, range(1, 3)), weights_of(backend)
    begun = train(backend, range(1))
    if backend.parallel.rank == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    kinds = {t.dtype for state in backend.optimizer.state.values() for t in state.values()}
    assert (torch.uint8 in kinds) == (options.get("optimizer") == EIGHT_BITS)
    return train(backend, range(1, 3)), weights_of(backend), begun


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with parameters large enough for 8 bits, also on each of two ranks."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), tied=True, hidden_size=64, intermediate_size=160)


@pytest.mark.parametrize("world_size, tp", [(1, 1), (2, 1), (2, 2)])
def test_a_run_in_8_bits_goes_on_as_if_never_stopped(run_ranks, wide, tmp_path, world_size, tp):
    args = wide, tp, {"optimizer": EIGHT_BITS}, tmp_path / "save"
    steps, weights, _ = run_ranks(_train_rank, world_size, *args, False)[0]
    again, loaded = run_ranks(_train_rank, world_size, *args, True)[0]
    assert again == steps and all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_run_goes_on_with_another_kind_of_moments_and_other_ranks(run_ranks, wide, tmp_path):
    folder = tmp_path / "save"
    steps, _, begun = run_ranks(_train_rank, 1, wide, 1, {"optimizer": EIGHT_BITS}, folder, False)[0]
    exact, _, same = run_ranks(_train_rank, 1, wide, 1, {}, tmp_path / "fp32", False)[0]
    torch.testing.assert_close(torch.tensor(begun), torch.tensor(same))
    for options, world_size, tp in (({}, 1, 1), ({"optimizer": EIGHT_BITS}, 2, 2)):
        loaded, _ = run_ranks(_train_rank, world_size, wide, tp, options, folder, True)[0]
        torch.testing.assert_close(torch.tensor(loaded), torch.tensor(steps), rtol=2e-2, atol=1e-3)
        assert loaded[0] == pytest.approx(steps[0], rel=1e-5)  # the same weights
    torch.testing.assert_close(torch.tensor(exact), torch.tensor(steps), rtol=2e-2, atol=1e-3)


def _offload_rank(path):
    backend = make_backend(path, optimizer_cpu_offload=True)
    return type(backend.optimizer), train(backend, range(2))


def test_on_a_cpu_the_states_are_in_host_memory_anyway(run_ranks, wide):
    kind, steps = run_ranks(_offload_rank, 1, wide)[0]
    assert kind is torch.optim.AdamW and len(steps) == 2
