"""What is optimized: advantages, losses, KL."""

from instep.arguments.flag import (
    ALGORITHMS,
    COUNT,
    FLOAT,
    MOE,
    NON_NEGATIVE,
    Flag,
    Group,
    Number,
    later,
    negation,
    refused,
    switch,
)

ALGORITHM = Group(
    "Algorithm",
    (
        Flag(
            "--advantage-estimator",
            default="grpo",
            help="grpo (arXiv 2402.03300); the others come later",
            choices=("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
            seeds="VSC",
        ),
        Flag(
            "--loss-type",
            default="policy_loss",
            choices=("policy_loss", "sft_loss", "custom_loss"),
            help="instep sft sets sft_loss; custom_loss comes later",
            seeds="C",
        ),
        Flag("--eps-clip", Number(float, 0, above=True), 0.2, "clip range of the ratio, below 1", seeds="VC"),
        Flag("--eps-clip-high", Number(float, 0, above=True), None, "above 1; default: --eps-clip", seeds="C"),
        Flag(
            "--eps-clip-c", Number(float, 1, above=True), None, "dual-clip constant, above 1; off if unset", seeds="C"
        ),
        Flag("--kl-coef", FLOAT, 0.0, "weight of the KL to the reference in the reward", seeds="VC"),
        switch("--use-kl-loss", "compute the KL to the reference in the loss", "C"),
        Flag("--kl-loss-coef", FLOAT, 0.0, "its weight; 0 only reports it", seeds="C"),
        Flag(
            "--kl-loss-type",
            default="k1",
            choices=("k1", "k2", "k3", "low_var_kl"),
            help="estimator of both KLs",
            seeds="C",
        ),
        switch("--use-unbiased-kl", "weigh the KL with the ratio to the old policy", "C"),
        Flag("--ref-update-interval", COUNT, None, "copy the actor to the reference every so many rollouts", seeds="C"),
        Flag("--entropy-coef", FLOAT, 0.0, "weight of the entropy bonus", seeds="C"),
        switch("--calculate-per-token-loss", "mean over all tokens, not over each sample's mean", "VSCM"),
        negation("--disable-rewards-normalization", "rewards_normalization", "no centring within a group", "C"),
        negation("--disable-grpo-std-normalization", "grpo_std_normalization", "no division by the group's std", "C"),
        switch("--normalize-advantages", "whiten the advantages over the rollout", "VC"),
        switch("--use-rollout-logprobs", "the engine's log-probs are the old policy's; nothing is recomputed", "C"),
        switch("--use-tis", "truncated importance sampling between trainer and engine", "VSC"),
        Flag("--tis-clip", Number(float, 0, above=True), 2.0, "its upper bound", seeds="C"),
        Flag("--tis-clip-low", NON_NEGATIVE, 0.0, "its lower bound", seeds="C"),
        *later(ALGORITHMS, "VC", "--num-critic-only-steps", "--value-clip", "--megatron-config-path"),
        Flag(
            "--critic-num-nodes", COUNT, None, "hosts of PPO's critic; default: the actor's (`instep plan`)", seeds="V"
        ),
        Flag("--critic-num-gpus-per-node", COUNT, None, "its ranks on each; default: the actor's", seeds="V"),
        *later(ALGORITHMS, "V", "--critic-load", "--critic-save"),
        *later(ALGORITHMS, "V", "--critic-lr", "--critic-lr-warmup-iters"),
        *later(
            ALGORITHMS, "C", "--gamma", "--lambd", "--custom-loss-function-path", "--custom-advantage-function-path"
        ),
        *later(ALGORITHMS, "C", "--custom-tis-function-path", "--custom-pg-loss-reducer-function-path"),
        *later(ALGORITHMS, "C", "--use-opsm", "--opsm-delta"),
        *later(ALGORITHMS, "C", "--use-opd", "--opd-type", "--opd-kl-coef", "--opd-teacher-load"),
        *later(ALGORITHMS, "C", "--opd-teacher-ckpt-step"),
        *later(MOE, "C", "--use-routing-replay", "--use-rollout-routing-replay"),
        *refused(
            "what a loss needs is computed, nothing else",
            "C",
            "--disable-compute-advantages-and-returns",
            instead="instep sft",
        ),
        *refused("entropy is reported at every step", "C", "--use-rollout-entropy"),
        *refused("the gap between trainer and engine is reported at every step", "C", "--get-mismatch-metrics"),
        *later("comes with the memory work", "C", "--recompute-loss-function", "--log-probs-chunk-size"),
    ),
)
