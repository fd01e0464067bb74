"""The optimizer and its learning rate, under Megatron's names."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import read_flags

OPTIMIZER = read_flags(__file__)


def learning_rate(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.min_lr > args.lr:
        yield Problem(f"{args.min_lr} is above --lr {args.lr}", "--min-lr", "lower it")
    if args.lr_warmup_init > args.lr:
        yield Problem(f"{args.lr_warmup_init} is above --lr {args.lr}", "--lr-warmup-init", "lower it")


def schedule(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        yield Problem("both are given", "--lr-warmup-iters and --lr-warmup-fraction", "give one of the two")
    if args.lr_decay_iters is not None and args.lr_warmup_iters >= args.lr_decay_iters:
        what = f"{args.lr_warmup_iters} is not below --lr-decay-iters"
        yield Problem(what, "--lr-warmup-iters", f"use less than {args.lr_decay_iters}")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield Problem("needs the steps of its last decay", "--lr-decay-style WSD", "give --lr-wsd-decay-iters")


RULES = (learning_rate, schedule)
