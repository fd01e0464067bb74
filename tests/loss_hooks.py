"""Hooks as users of slime write them, for tests; only the import paths are instep's."""

import torch

from instep.training.slime_api import all_gather_with_cp, get_log_probs_and_entropy, slice_log_prob_with_cp


def icepop(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    """The correction in the flat form: a weight per token, masks as they were."""
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, torch.zeros_like(ratio))
    return pg_loss * weight, loss_masks, {"tis": ratio.clone(), "kept": inside.float()}


def sequence_rejection(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    """The correction in the form of slime's example: sample by sample, with context-parallel helpers and masks."""
    weights, masks = [], []
    for train, engine, mask, total, length in zip(
        train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, strict=True
    ):
        full = all_gather_with_cp(train - engine, total, length)
        ratio = (full * mask).sum().exp()
        weights.append(slice_log_prob_with_cp(ratio.expand_as(full), total, length))
        masks.append(mask * float(args.tis_lower_bound <= ratio <= args.tis_upper_bound))
    weight = torch.cat(weights)
    return pg_loss * weight.clamp(0, args.tis_upper_bound), masks, {"mis_weight": weight}


def dr_grpo_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """The sum over samples of their tokens' losses over a constant."""

    def reduce(x):
        parts = zip(x.split(response_lengths, dim=0), loss_masks, strict=True)
        return sum((part * mask).sum() / 10 for part, mask in parts)

    return reduce


def nan_under_the_mask(*, pg_loss, loss_masks, **kwargs):
    mask = torch.cat(loss_masks)
    return pg_loss, loss_masks, {"one": mask / mask}


def kept_tokens_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """The mean over the tokens that the correction has kept, whatever the denominators are."""
    return lambda x: (x * torch.cat(loss_masks)).sum() / torch.cat(loss_masks).sum()


def ppo_loss(args, batch, logits, sum_of_sample_mean):
    """A whole loss over logits: PPO's clip and an entropy bonus."""
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    log_probs, old = torch.cat(out["log_probs"]), torch.cat(batch["log_probs"])
    advantages = torch.cat(batch["advantages"])
    ratio = (log_probs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)
    pg_loss, entropy = -sum_of_sample_mean(surrogate), sum_of_sample_mean(torch.cat(out["entropy"]))
    loss = pg_loss - args.entropy_coef * entropy
    return loss, {"pg_loss": pg_loss.detach(), "entropy": entropy.detach(), "log_prob": sum_of_sample_mean(log_probs)}


def raises(**kwargs):
    raise KeyError("oops")


def forgets_the_masks(*, pg_loss, **kwargs):
    return pg_loss, {}


def metrics_of_another_shape(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mean": pg_loss.mean()}


def takes_an_own_name(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"loss": pg_loss}


def convert(args, samples):
    """The conversion as slime's own is: rewards compared within groups, masks, denominators of executions."""
    rewards = torch.tensor([sample.get_reward_value(args) for sample in samples])
    groups = rewards.view(-1, args.n_samples_per_prompt)
    groups = groups - groups.mean(-1, keepdim=True)
    groups = groups / (groups.std(-1, keepdim=True) + 1e-6)
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    masks = [[0] * len(m) if s.remove_sample else m for m, s in zip(masks, samples, strict=True)]
    ids = [sample.rollout_id or sample.index for sample in samples]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": groups.flatten().tolist(),
        "raw_reward": rewards.tolist(),
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": ids,
        "loss_masks": masks,
        "rollout_mask_sums": [sum(sum(m) for m, i in zip(masks, ids, strict=True) if i == own) for own in ids],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def convert_with_weights(args, samples):
    """Half the rewards, and a field of the user's own with which `weighted_loss` makes up for it."""
    data = convert(args, samples)
    data["rewards"] = [reward / 2 for reward in data["rewards"]]
    data["metadata"] = [{"of": sample.index} for sample in samples]
    return {**data, "weights": [[2.0] * sample.response_length for sample in samples]}


def weighted_loss(args, batch, logits, sum_of_sample_mean):
    """`ppo_loss` with advantages times the weights."""
    assert len(batch["metadata"]) == len(batch["weights"])
    advantages = [
        a * torch.tensor(w, device=a.device) for a, w in zip(batch["advantages"], batch["weights"], strict=True)
    ]
    return ppo_loss(args, {**batch, "advantages": advantages}, logits, sum_of_sample_mean)
