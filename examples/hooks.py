"""A function for each flag that takes one (`--custom-rm-path examples.hooks.reward`); docs/hooks.md shows them."""

from __future__ import annotations

import torch

from instep.data.source import RolloutDataSourceWithBuffer
from instep.rollout import vllm_rollout
from instep.rollout.filters import DynamicFilterOutput
from instep.rollout.tokens import next_turn
from instep.training.megatron.hooks import model_provider
from instep.training.slime_api import get_log_probs_and_entropy
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

# ---- rollouts --------------------------------------------------------------------------------------------------------


class DataSource(RolloutDataSourceWithBuffer):
    """The run's own rows, with a note in the metadata of each sample."""

    def get_samples(self, num_groups):
        groups = super().get_samples(num_groups)
        for sample in (s for group in groups for s in group):
            sample.metadata["one_of"] = len(self)
        return groups


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = vllm_rollout.generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    return RolloutFnTrainOutput(output.samples, {**output.metrics, "rollout/mine": 1.0})


def evaluate(args, rollout_id, data_source, evaluation=True):
    samples = [Sample(prompt=f"{n} + {n} =", label=str(2 * n), response=str(2 * n)) for n in range(4)]
    rewards = [float(s.response == s.label) for s in samples]  # ask the engine here, as `generate` does
    return RolloutFnEvalOutput({"sums": {"rewards": rewards, "truncated": [False] * 4, "samples": []}})


async def generate(args, sample, sampling_params):
    """Two turns: the model answers, is asked whether it is sure, and answers again."""
    half = sampling_params["max_new_tokens"] // 2
    first = await vllm_rollout.generate(args, sample, {**sampling_params, "max_new_tokens": half})
    if first.status is not Sample.Status.COMPLETED:  # cut off, or aborted: its turn has no end
        return first
    second = next_turn(args, first, [{"role": "user", "content": "Are you sure?"}])
    second = await vllm_rollout.generate(args, second, sampling_params)
    return second if second is first else [first, second]  # two where the template changes the first turn then


async def note_length(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["num_words"] = len(sample.response.split())


async def reward(args, sample, **kwargs):
    right = sample.response.strip().startswith(str(sample.label))
    return {"score": float(right), "brevity": 1.0 / (1 + sample.response_length)}


def keep_mixed_groups(args, group, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in group]
    keep = max(rewards) > min(rewards)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"all_{rewards[0]:g}")


def newest_first(args, rollout_id, buffer, num_groups):
    return [buffer.pop() for _ in range(min(num_groups, len(buffer)))]


def leave_out_truncated(args, groups):
    for sample in (s for group in groups for s in group):
        sample.remove_sample = sample.status is Sample.Status.TRUNCATED


def count_all(args, all_groups, data_source):
    print(f"{len(all_groups)} groups were finished; the data source has {len(data_source)} prompts")


# ---- from samples to training ----------------------------------------------------------------------------------------


def rank_rewards(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    order = sorted(range(len(raw)), key=raw.__getitem__)
    rank = {i: place for place, i in enumerate(order)}
    return raw, [rank[i] - (len(raw) - 1) / 2 for i in range(len(raw))]


def convert(args, samples):
    rewards = [sample.get_reward_value(args) for sample in samples]
    mean = sum(rewards) / len(rewards)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
        "rewards": [value - mean for value in rewards],
        "raw_reward": rewards,
        "truncated": [int(sample.truncated) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def constant_advantages(args, rollout_data):
    pairs = zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    rollout_data["advantages"] = rollout_data["returns"] = [torch.full((n,), float(r)) for r, n in pairs]


def mask_first_token(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[:1] = 0


# ---- the loss --------------------------------------------------------------------------------------------------------


def truncated_weights(
    *, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(max=2.0), loss_masks, {"tis_ratio": ratio}


def sum_over_length(total_lengths, response_lengths, masks, per_token):
    def reduce(losses):
        parts = zip(losses.split(response_lengths), masks, strict=True)
        return sum((part * mask).sum() / 1024 for part, mask in parts)

    return reduce


def reinforce(args, batch, logits, reducer):
    _, scored = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    log_probs = torch.cat(scored["log_probs"])
    return -reducer(log_probs * torch.cat(batch["advantages"])), {"log_prob": reducer(log_probs.detach())}


# ---- what is logged --------------------------------------------------------------------------------------------------


def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):
    longest = max(sample.response_length for sample in samples)
    print(f"rollout {rollout_id}: {len(samples)} samples in {rollout_time:.1f} s, the longest of {longest} tokens")
    return False  # instep logs its own metrics, too


def log_evaluation(rollout_id, args, data, extra_metrics):
    for name, result in data.items():
        print(f"{name} before rollout {rollout_id}: {sum(result['rewards']) / len(result['rewards']):.3f}")
    return False


# ---- Megatron --------------------------------------------------------------------------------------------------------


def freeze_first_layer(pre_process, post_process, vp_stage=None):
    model = model_provider(pre_process, post_process, vp_stage)
    if pre_process:
        model.decoder.layers[0].requires_grad_(False)
    return model


def layer_spec(args, config, vp_stage=None):
    """Megatron's own layers, with attention over bounded values."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.attention import SelfAttention

    class BoundedAttention(SelfAttention):
        def get_query_key_value_tensors(self, *args, **kwargs):
            query, key, value, *rest = super().get_query_key_value_tensors(*args, **kwargs)
            return query, key, value.clamp(-0.1, 0.1), *rest

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = BoundedAttention
    return block


def megatron_started(args):
    print(f"Megatron's process groups stand; tensor parallel over {args.tensor_model_parallel_size}")


def before_log_probs(args, model, store_prefix):
    print(f"{store_prefix or 'actor_'}log_probs are computed by {len(model)} modules")


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    print(f"rollout {rollout_id}, step {step_id}")
