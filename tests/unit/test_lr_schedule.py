from types import SimpleNamespace

import pytest

from instep.errors import ConfigError
from instep.training.lr_schedule import LRSchedule, from_args


def megatron_lrs(num_steps: int, **kw) -> list[float]:
    pytest.importorskip("megatron.core")
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{}]), start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant", **kw
    )
    lrs = []
    for _ in range(num_steps):
        lrs.append(scheduler.get_lr({}))
        scheduler.step(1)
    return lrs


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup, init", [(0, 0.0), (7, 0.0), (7, 1e-5)])
def test_equals_megatron(style, warmup, init):
    ours = LRSchedule(lr=1e-3, min_lr=1e-4, warmup=warmup, decay=40, style=style, init_lr=init)
    theirs = megatron_lrs(
        60, init_lr=init, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=warmup, lr_decay_steps=40, lr_decay_style=style
    )
    assert [ours.lr_at(step) for step in range(60)] == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("wsd_style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_equals_megatron(wsd_style):
    ours = LRSchedule(lr=1e-3, min_lr=1e-4, warmup=5, decay=40, style="WSD", wsd_decay=11, wsd_style=wsd_style)
    theirs = megatron_lrs(
        60, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=5, lr_decay_steps=40, lr_decay_style="WSD",
        wsd_decay_steps=11, lr_wsd_decay_style=wsd_style,
    )  # fmt: skip
    assert [ours.lr_at(step) for step in range(60)] == pytest.approx(theirs, rel=1e-12)


def args(**kw) -> SimpleNamespace:
    base = dict(lr=1e-3, min_lr=0.0, lr_decay_style="linear", lr_warmup_iters=0, lr_warmup_fraction=None,
                lr_decay_iters=None, lr_warmup_init=0.0)  # fmt: skip
    return SimpleNamespace(**{**base, **kw})


def test_from_args_decays_over_the_run_unless_told_otherwise():
    assert from_args(args(), 20).lr_at(10) == pytest.approx(5e-4)
    assert from_args(args(lr_decay_iters=40), 20).lr_at(10) == pytest.approx(7.5e-4)
    assert from_args(args(lr_warmup_fraction=0.5), 20).lr_at(5) == pytest.approx(5e-4)
    assert from_args(args(lr_warmup_fraction=0.5, lr_decay_iters=40), 20).lr_at(10) == pytest.approx(5e-4)
    assert from_args(args(lr_warmup_iters=4), 20).lr_at(1) == pytest.approx(2.5e-4)
    assert from_args(args(lr_decay_style="constant", lr_warmup_iters=30), 20).lr_at(31) == 1e-3


@pytest.mark.parametrize(
    "bad",
    [
        dict(lr_warmup_iters=20),
        dict(lr_decay_style="WSD", lr_wsd_decay_iters=21, lr_wsd_decay_style="linear"),
    ],
)
def test_contradictions_are_config_errors(bad):
    with pytest.raises(ConfigError):
        from_args(args(**bad), 20)
