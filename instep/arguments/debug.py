"""Debugging: all of it comes later, but its names are known."""

from instep.arguments.flag import HARDENING, Group, later, refused

DEBUG = Group(
    "Debugging",
    (
        *later(HARDENING, "C", "--debug-rollout-only", "--debug-train-only", "--save-debug-rollout-data"),
        *later(HARDENING, "C", "--load-debug-rollout-data", "--load-forge-rollout-data"),
        *later(HARDENING, "C", "--load-debug-rollout-data-subsample", "--save-debug-train-data", "--dump-details"),
        *later(HARDENING, "C", "--memory-snapshot-dir", "--memory-snapshot-num-steps", "--memory-recorder"),
        *later(HARDENING, "CM", "--record-memory-history"),
        *later(HARDENING, "C", "--profile-target"),
        *refused("every sync is proven on every engine", "C", "--check-weight-update-equal"),
        *refused(
            "instep's own tests check these numbers",
            "C",
            "--ci-test",
            "--ci-disable-kl-checker",
            "--ci-train-rollout-logprob-abs-diff-threshold",
            "--ci-save-grad-norm",
            "--ci-load-grad-norm",
        ),
    ),
)
