"""Logging: Weights & Biases, TensorBoard and the samples that are shown."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import INDEX, Flag, FlagGroup, later, path_flag, refused, switch

LOGGERS = FlagGroup(
    "Logging",
    (
        switch("--use-wandb", "log to Weights & Biases", "CA"),
        Flag(
            "--wandb-mode", choices=("online", "offline", "disabled"), help="default: WANDB_MODE, or online", whose="C"
        ),
        path_flag("--wandb-dir", "folder of its files; default: the run's", "C"),
        Flag("--wandb-key", help="API key; never saved (better: the variable WANDB_API_KEY)", whose="C", secret=True),
        Flag("--wandb-host", help="its server", whose="C"),
        Flag("--wandb-team", help="entity", whose="C"),
        Flag("--wandb-group", help="group, and stem of the run's name", whose="C"),
        Flag("--wandb-project", help="project", whose="CM"),
        Flag("--wandb-run-id", help="the run to continue", whose="C"),
        *refused("the names of runs have no random suffix", "C", "--disable-wandb-random-suffix"),
        *refused("all metrics of a rollout have its number as their step", "C", "--wandb-always-use-train-step"),
        switch("--use-tensorboard", "write TensorBoard events", "C"),
        *refused(
            "the events lie in RUN_DIR/tensorboard",
            "C",
            "--tb-project-name",
            "--tb-experiment-name",
            instead="--run-dir",
        ),
        Flag(
            "--num-logged-samples",
            INDEX,
            8,
            "samples of each rollout (and evaluation set) in samples.jsonl, beside the best, the worst and the longest",
        ),
        switch("--log-passrate", "pass@k of rollouts and evaluations; a reward of 1 or more solves a prompt", "C"),
        *later(
            "further metrics of rollouts come later",
            "C",
            *("--log-multi-turn", "--log-reward-category", "--log-correct-samples"),
            instead="--custom-rollout-log-function-path, a function of yours that logs them",
        ),
    ),
)


def wandb(args: Settings, given: set[str]) -> Iterator[Problem]:
    extra = sorted(f.name for f in LOGGERS.flags if f.attribute in given and f.attribute.startswith("wandb_"))
    if extra and not args.use_wandb:
        yield Problem("has no effect without --use-wandb", ", ".join(extra), "give both")


RULES = (wandb,)
