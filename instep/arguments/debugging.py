"""Debugging: parts of a run alone, dumps and their replay, alarms, the trial of hooks."""

from instep.arguments.flag import (
    FRACTION,
    HARDENING,
    NON_NEGATIVE,
    Flag,
    FlagGroup,
    Number,
    later,
    negation,
    refused,
    switch,
)

DEBUGGING = FlagGroup(
    "Debugging",
    (
        switch("--debug-rollout-only", "no trainer: rollouts and evaluations with the engine alone", "C"),
        switch("--debug-train-only", "no engine: the rollout function must do without one", "C"),
        Flag(
            "--save-debug-rollout-data",
            help="FILE with {rollout_id}: torch.save of each rollout's samples (evaluations: eval_ before the number)",
            seeds="C",
        ),
        Flag(
            "--load-debug-rollout-data",
            help="FILE with {rollout_id}: train on what the former saved, without an engine",
            seeds="C",
        ),
        Flag(
            "--load-debug-rollout-data-subsample",
            Number(float, 0, 1, above=True),
            None,
            "share of its groups, the first ones (at least one)",
            seeds="C",
        ),
        Flag(
            "--save-debug-train-data",
            help="FILE with {rollout_id}: torch.save of what the trainer got and computed, sample by sample; {rank} is "
            "0: one file holds all ranks' samples",
            seeds="C",
        ),
        Flag(
            "--dump-details",
            help="DIR: both dumps (rollout_data/, train_data/) and a copy of the tokenizer",
            seeds="C",
        ),
        negation(
            "--no-hook-trial",
            "hook_trial",
            "do not try hooks on 4 prompts before the run (a hook sees these calls, too)",
        ),
        Flag(
            "--alarm-entropy-fraction",
            FRACTION,
            0.02,
            "alarm when the entropy falls below this share of what it was at the start; 0: off",
        ),
        Flag(
            "--alarm-gap",
            NON_NEGATIVE,
            0.1,
            "alarm when the mean log-prob gap or the engine's KL is above this (nats), or above a tenth of it and ten "
            "times what it was at the start; 0: off",
        ),
        Flag("--alarm-truncated-ratio", FRACTION, 0.5, "alarm when more responses are cut off; 1: off"),
        Flag("--alarm-zero-std-ratio", FRACTION, 0.95, "alarm when more groups have one reward throughout; 1: off"),
        *later(HARDENING, "C", "--load-forge-rollout-data"),
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
