"""Rewards."""

from instep.arguments.flag import COUNT, Flag, Group, hook, later, switch

REWARD = Group(
    "Reward",
    (
        Flag("--rm-type", help="built-in reward, such as math; a prefix boxed_ takes the last \\boxed{}", seeds="C"),
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
        *later("remote reward servers come later", "C", "--rm-url", instead="--custom-rm-path"),
    ),
)
