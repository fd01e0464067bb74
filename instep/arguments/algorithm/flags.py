"""The flags of what is optimized: advantages, losses, KL."""

from instep.algorithms.catalog import ALGORITHMS, OFFLINE, listed, names_where
from instep.arguments.flag import (
    COEFFICIENT,
    COUNT,
    FRACTION,
    GPUS,
    GPUS_PER_NODE,
    INDEX,
    NON_NEGATIVE,
    POSITIVE,
    RATE,
    Flag,
    FlagGroup,
    Number,
    accepted,
    hook,
    http_address,
    negation,
    path_flag,
    refused,
    switch,
)


def _own_defaults(attribute: str) -> str:
    """The defaults that algorithms have of their own for a flag: `0.5 with a, 2 with b`."""
    return ", ".join(f"{a.defaults[attribute]:g} with {a.name}" for a in ALGORITHMS.values() if attribute in a.defaults)


_DEFAULT = next(iter(ALGORITHMS.values()))
_OWN_LOSS = [a for a in ALGORITHMS.values() if a.estimator == _DEFAULT.estimator and a != _DEFAULT]
_DISCOUNTED = listed(names_where(lambda estimator, loss: estimator.discounts), "and")
_WITH_CRITIC = listed(names_where(lambda estimator, loss: estimator.has_critic), "and")

TAU = Number(float, 0.001, 1000)

ALGORITHM = FlagGroup(
    "Algorithm",
    (
        Flag(
            "--advantage-estimator",
            default=_DEFAULT.name,
            help="how advantages are made from rewards; "
            f"{listed([f'{a.name} ({a.paper})' for a in _OWN_LOSS], 'and')} are {_DEFAULT.name} with a loss of their "
            "own (docs/algorithms.md)",
            choices=tuple(ALGORITHMS),
            whose="VSC",
        ),
        Flag(
            "--loss-type",
            default=_DEFAULT.loss.type,
            choices=(_DEFAULT.loss.type, *(a.loss.type for a in OFFLINE.values()), "custom_loss"),
            help="instep sft sets sft_loss, instep dpo dpo_loss; custom_loss is --custom-loss-function-path",
            whose="C",
        ),
        Flag(
            "--eps-clip",
            POSITIVE,
            0.2,
            "clip range of the ratio, below 1 (dppo: of the divergence; cispo: 1 for no lower bound); unless given "
            + _own_defaults("eps_clip"),
            whose="VC",
        ),
        Flag(
            "--eps-clip-high",
            POSITIVE,
            None,
            f"above 1; default: --eps-clip; unless that is given {_own_defaults('eps_clip_high')}",
            whose="C",
        ),
        Flag(
            "--eps-clip-c",
            Number(float, 1, 1e6, above=True),
            None,
            "dual-clip constant (dppo: upper bound of the ratio), above 1; off if unset",
            whose="C",
        ),
        Flag(
            "--gspo-gradient",
            default="token",
            choices=("token", "sequence"),
            help="of gspo where tokens have weights of their own (--use-tis, --use-rs): through each token's log-prob "
            "(GSPO-token, verl), or through the ratio of the response, the same for all its tokens (slime, TRL)",
        ),
        Flag("--sapo-tau-pos", TAU, 1.0, "temperature of SAPO's gate where the advantage is positive"),
        Flag("--sapo-tau-neg", TAU, 1.05, "the same where it is negative"),
        Flag("--kl-coef", COEFFICIENT, 0.0, "weight of the KL to the reference in the reward", whose="VC"),
        switch("--use-kl-loss", "compute the KL to the reference in the loss", "C"),
        Flag("--kl-loss-coef", COEFFICIENT, 0.0, "its weight; 0 only reports it", whose="C"),
        Flag(
            "--kl-loss-type",
            default="k1",
            choices=("k1", "k2", "k3", "low_var_kl"),
            help="estimator of both KLs; in the loss not k1, whose expected gradient is 0 there (docs/algorithms.md)",
            whose="C",
        ),
        switch("--use-unbiased-kl", "weigh the KL with the ratio to the old policy", "C"),
        Flag(
            "--ref-served-model",
            help="name of a model of --vllm-config that keeps its weights: the reference of the KL; default: a copy of "
            "--ref-load in the trainer",
        ),
        Flag("--ref-update-interval", COUNT, None, "copy the actor to the reference every so many rollouts", whose="C"),
        Flag("--entropy-coef", COEFFICIENT, 0.0, "weight of the entropy bonus", whose="C"),
        switch("--calculate-per-token-loss", "mean over all tokens, not over each sample's mean", "VSCM"),
        Flag(
            "--constant-loss-length",
            COUNT,
            None,
            "mean over samples of each sample's sum over tokens / INT, whatever its length (Dr. GRPO, 2503.20783); "
            "usually --rollout-max-response-len",
        ),
        negation("--disable-rewards-normalization", "rewards_normalization", "no centring within a group", "C"),
        negation("--disable-grpo-std-normalization", "grpo_std_normalization", "no division by the group's std", "C"),
        switch("--normalize-advantages", "whiten the advantages over the rollout", "VC"),
        switch(
            "--use-rollout-logprobs",
            "the engine's log-probs are the old policy's; nothing is recomputed (always so with dppo)",
            "C",
        ),
        switch("--use-tis", "importance weights between trainer and engine (truncated importance sampling)", "VSC"),
        Flag("--tis-clip", POSITIVE, 2.0, "upper bound", aliases=("--tis-upper-bound",), whose="C"),
        Flag("--tis-clip-low", NON_NEGATIVE, 0.0, "lower bound", aliases=("--tis-lower-bound",), whose="C"),
        Flag(
            "--tis-level",
            default="token",
            choices=("token", "sequence", "geometric"),
            help="the weight is a token's ratio, the product over its sample, or their geometric mean",
        ),
        Flag(
            "--tis-mode",
            default="clip",
            choices=("truncate", "clip", "mask"),
            help="outside the bounds: cut above only, cut to both, or 0 (mask: MIS; with --tis-level token IcePop)",
        ),
        switch("--use-rs", "leave out tokens or samples on which trainer and engine disagree (rejection)"),
        Flag(
            "--rs-level",
            default="token",
            choices=("token", "sequence", "geometric"),
            help="what is rejected by its ratio: tokens, samples by their product, by their geometric mean",
        ),
        Flag("--rs-lower-bound", NON_NEGATIVE, None, "ratio below which is rejected; default: --tis-clip-low"),
        Flag("--rs-upper-bound", POSITIVE, None, "ratio above which is rejected; default: --tis-clip"),
        Flag("--rs-veto-threshold", POSITIVE, None, "reject a sample that has a token of a ratio below, such as 1e-4"),
        *refused("the weights would depend on what shares a micro-batch", "", "--tis-batch-normalize"),
        Flag(
            "--custom-tis-function-path",
            hook,
            None,
            "f(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths): "
            "(pg_loss, masks, metrics) in place of the built-in correction",
            whose="C",
        ),
        switch("--use-opsm", "leave out tokens of negative advantage of samples that the policy has left", "C"),
        Flag(
            "--opsm-delta",
            COEFFICIENT,
            1e-4,
            "mean of old minus new log-prob above which a sample is left out",
            whose="C",
        ),
        Flag(
            "--custom-pg-loss-reducer-function-path",
            hook,
            None,
            "f(total_lengths, response_lengths, masks, per_token): function from token losses to a sum over samples",
            whose="C",
        ),
        Flag(
            "--custom-loss-function-path",
            hook,
            None,
            "f(args, batch, logits, reducer): (loss, metrics); with --loss-type custom_loss",
            whose="C",
        ),
        Flag("--value-clip", POSITIVE, 0.2, f"clip range of the critic's values ({_WITH_CRITIC})", whose="VC"),
        Flag("--num-critic-only-steps", INDEX, 0, "first rollouts that train PPO's critic alone", whose="VC"),
        path_flag(
            "--megatron-config-path",
            f"YAML file of what actor and critic are set to, each: learning rate, load, save ({_WITH_CRITIC})",
            "VC",
        ),
        Flag(
            "--critic-num-nodes", GPUS, None, "hosts of PPO's critic; default: the actor's (`instep plan`)", whose="V"
        ),
        Flag("--critic-num-gpus-per-node", GPUS_PER_NODE, None, "its ranks on each; default: the actor's", whose="V"),
        path_flag(
            "--critic-load",
            "weights of a new run's critic: a --save or --critic-save folder, or a Hugging Face one, which gets a "
            "new value head; default: those of the actor, with a new head. A resume takes the critic of --load",
            "V",
        ),
        path_flag("--critic-save", "folder that gets the critic's part of each checkpoint once more", "V"),
        Flag("--critic-lr", RATE, None, "learning rate of the critic; default: --lr", whose="V"),
        Flag("--critic-lr-warmup-iters", INDEX, 0, "its steps of linear warm-up", whose="V"),
        Flag("--gamma", FRACTION, 1.0, f"discount per trained token of {_DISCOUNTED}", whose="C"),
        Flag("--lambd", FRACTION, 1.0, f"lambda of the generalised advantage estimation ({_WITH_CRITIC})", whose="C"),
        Flag(
            "--custom-advantage-function-path",
            hook,
            None,
            "f(args, rollout_data): sets rollout_data['advantages'], instead of the estimator",
            whose="C",
        ),
        Flag(
            "--dpo-beta",
            Number(float, 0, 1000, above=True),
            0.1,
            "instep dpo: how closely the policy stays at the reference (2305.18290)",
        ),
        Flag(
            "--dpo-label-smoothing",
            Number(float, 0, 0.49),
            0.0,
            "instep dpo: probability that a pair is the wrong way round (conservative DPO)",
        ),
        Flag("--overlong-buffer-len", COUNT, None, "tokens before --rollout-max-response-len that cost reward (DAPO)"),
        Flag("--overlong-penalty-factor", POSITIVE, 1.0, "reward taken off at --rollout-max-response-len"),
        switch("--use-opd", "on-policy distillation: the KL to a teacher is taken off the advantage", "C"),
        Flag(
            "--opd-type",
            default=None,
            choices=("engine", "model", "sglang", "megatron"),
            help="the teacher is served at --opd-teacher-url (engine; slime: sglang), or a frozen model in the workers "
            "(model; slime: megatron); default: as the other flags say",
            whose="C",
        ),
        Flag("--opd-kl-coef", POSITIVE, 1.0, "weight of the KL to the teacher", whose="C"),
        Flag(
            "--opd-teacher-url",
            http_address,
            None,
            "http://HOST:PORT of an engine that serves the teacher; default: that of --rm-url",
        ),
        path_flag("--opd-teacher-load", "the teacher's checkpoint, Hugging Face or instep's", "C"),
        Flag("--opd-teacher-ckpt-step", INDEX, None, "which iteration of it; default: the latest", whose="C"),
        switch(
            "--use-rollout-routing-replay",
            "a mixture of experts trains with the experts that the engine chose for each token (R3)",
            "C",
        ),
        switch(
            "--use-routing-replay",
            "a mixture of experts trains with the experts that it chose when its old log-probs were computed",
            "C",
        ),
        *refused(
            "what a loss needs is computed, nothing else",
            "C",
            "--disable-compute-advantages-and-returns",
            instead="instep sft",
        ),
        *refused("entropy is reported at every step", "C", "--use-rollout-entropy"),
        *refused("the gap between trainer and engine is reported at every step", "C", "--get-mismatch-metrics"),
        *accepted(
            "logits are made in chunks and recomputed in the backward pass wherever they are large",
            "C",
            "--recompute-loss-function",
            "--log-probs-chunk-size",
        ),
    ),
)
