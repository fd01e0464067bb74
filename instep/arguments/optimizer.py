"""The optimizer and its learning rate, under Megatron's names."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import COUNT, FRACTION, INDEX, NON_NEGATIVE, RATE, Flag, FlagGroup, Number, later, switch

BETA = Number(float, 0, 0.999999)  # in fp32 more is 1

OPTIMIZER = FlagGroup(
    "Optimizer",
    (
        Flag(
            "--optimizer",
            default="adam",
            choices=("adam", "adamw_8bit"),
            help="AdamW; adamw_8bit keeps its moments in 8 bits",
            whose="M",
        ),
        switch(
            "--optimizer-cpu-offload",
            "keep the optimizer's moments in host memory, masters stay on the GPU; no effect on a CPU",
            "M",
        ),
        Flag("--lr", RATE, 1e-6, "learning rate", whose="CM"),
        Flag("--min-lr", RATE, 0.0, "lowest learning rate of the decay", whose="M"),
        Flag(
            "--lr-decay-style",
            default="linear",
            choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
            help="shape of the decay",
            whose="M",
        ),
        Flag("--lr-warmup-iters", INDEX, 0, "steps of linear warm-up", whose="M"),
        Flag("--lr-warmup-fraction", FRACTION, None, "instead: this part of the decay steps", whose="M"),
        Flag("--lr-warmup-init", RATE, 0.0, "learning rate at the start of the warm-up", whose="M"),
        Flag("--lr-wsd-decay-iters", COUNT, None, "steps of the last decay with WSD", whose="M"),
        Flag(
            "--lr-wsd-decay-style",
            default="exponential",
            choices=("linear", "cosine", "exponential", "minus_sqrt"),
            help="its shape",
            whose="M",
        ),
        Flag("--lr-decay-iters", COUNT, None, "steps of the decay; default: all steps of the run", whose="M"),
        Flag("--weight-decay", Number(float, 0, 100), 0.01, "decoupled weight decay", whose="M"),
        Flag("--adam-beta1", BETA, 0.9, "first-moment decay", whose="M"),
        Flag("--adam-beta2", BETA, 0.999, "second-moment decay", whose="M"),
        Flag("--adam-eps", Number(float, 1e-30, 1), 1e-8, "added to the denominator", whose="M"),
        Flag("--clip-grad", NON_NEGATIVE, 1.0, "largest gradient norm; 0: no clipping", whose="CM"),
        *later("resetting the optimizer between rollouts comes later", "C", "--reset-optimizer-states"),
        *later("an Adam without states comes later", "C", "--use-stateless-adam"),
    ),
)


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
