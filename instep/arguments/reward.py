"""Rewards."""

from instep.arguments.flag import COUNT, TYPE_LABELS, Flag, FlagGroup, hook, switch

RULES = ("math", "deepscaler", "dapo", "f1", "gpqa", "random", "remote_rm")  # a test compares it with rollout/rewards


def rm_type(value: str) -> str:
    """A built-in reward, perhaps with the prefix boxed_."""
    if value.removeprefix("boxed_") not in RULES:
        raise ValueError(f"is no built-in reward: {', '.join(RULES)}, with or without the prefix boxed_")
    return value


TYPE_LABELS[rm_type] = "NAME"

REWARD = FlagGroup(
    "Reward",
    (
        Flag(
            "--rm-type",
            rm_type,
            None,
            f"built-in reward: {', '.join(RULES)}; boxed_ before it takes the last \\boxed{{}}",
            seeds="C",
        ),
        Flag("--rm-url", help="address of the reward server, for --rm-type remote_rm", seeds="C"),
        Flag("--custom-rm-path", hook, None, "async f(args, sample): a reward of your own", seeds="VSC"),
        Flag("--reward-key", help="which entry counts, where a reward is a dict", seeds="C"),
        Flag("--eval-reward-key", help="the same in evaluation; default: --reward-key", seeds="C"),
        switch("--group-rm", "call the reward once per group, with a list of samples", "C"),
        Flag(
            "--custom-reward-post-process-path",
            hook,
            None,
            "f(args, samples) -> (raw, rewards), instead of the normalization over groups",
            seeds="C",
        ),
        Flag("--reward-num-workers", COUNT, None, "processes for built-in rewards; default: by the number of cores"),
    ),
)
