"""The bounds of waits, in seconds. The error of a bound that has expired names the process that was waited for."""

from instep.arguments.flag import SECONDS, Flag, FlagGroup

TIMEOUTS = FlagGroup(
    "Bounds of waits, in seconds",
    (
        Flag("--worker-start-timeout", SECONDS, 300.0, "until a trainer rank is ready"),
        Flag("--engine-start-timeout", SECONDS, 300.0, "until an engine is ready"),
        Flag("--sync-timeout", SECONDS, 600.0, "for one weight sync"),
        Flag("--train-timeout", SECONDS, 3600.0, "for training on one rollout"),
        Flag("--rollout-timeout", SECONDS, 3600.0, "for one rollout"),
        Flag("--reward-timeout", SECONDS, 30.0, "for one reward"),
        Flag(
            "--heartbeat-timeout",
            SECONDS,
            60.0,
            "for a sign of life from a training rank or an engine (a process that the kernel calls stopped: 3 s; "
            "the core of a vLLM: five times as long)",
        ),
    ),
)
