"""Hooks of the shapes that slime's examples have; the import paths and the engine's route are vLLM's and instep's."""

from __future__ import annotations

import copy

import torch

from instep.rollout.filters import DynamicFilterOutput
from instep.rollout.http import post
from instep.rollout.sglang_rollout import GenerateState
from instep.rollout.tokens import tokenizer_of
from instep.rollout.vllm_rollout import generate_rollout as default_rollout
from instep.system.hooks import load_function
from instep.types import RolloutFnTrainOutput, Sample

seen = []


async def ask(args, ids, max_tokens):
    """One turn: ids, log-probs, text, and what slime calls meta_info."""
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    params = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "seed": len(ids)}
    output = await post(url, {"model": args.hf_checkpoint, "token_ids": ids, "sampling_params": params})
    choice = output["choices"][0]
    new = list(choice["token_ids"])
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    reason = choice["finish_reason"]
    return new, log_probs, tokenizer_of(args).decode(new), {"finish_reason": {"type": reason}, "weight_version": "7"}


async def generate_with_tool(args, sample: Sample, sampling_params) -> Sample:
    """Several turns with an observation after each, as in slime's retool and search-r1."""
    assert not args.partial_rollout
    tokenizer = GenerateState(args).tokenizer
    sample.rollout_log_probs, sample.response, sample.response_length, sample.loss_mask = None, "", 0, []
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    loss_mask, response_ids = sample.loss_mask, []  # an alias: the mask grows in place
    for _turn in range(2):
        new, log_probs, text, meta_info = await ask(args, prompt_ids + response_ids, 4)
        response_ids += new
        sample.append_response_tokens(
            args, tokens=new, log_probs=log_probs, trainable=True, meta_info=meta_info, text=text
        )
        if meta_info["finish_reason"]["type"] == "stop":
            break
        observation = tokenizer(" observed", add_special_tokens=False)["input_ids"]
        response_ids += observation
        sample.append_response_tokens(args, tokens=observation, trainable=False, text=" observed")
        assert len(response_ids) == len(sample.rollout_log_probs)
    sample.tokens, sample.response_length, sample.loss_mask = prompt_ids + response_ids, len(response_ids), loss_mask
    sample.tool_call_count = _turn
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    solution = sample.prompt + sample.response
    return {"score": float(sample.index % 2), "length": float(len(solution)), "calls": float(sample.tool_call_count)}


def keep_groups_that_differ(args, samples: list[Sample], **kwargs):
    """The filter of slime's quick start; drops all groups but those of the first two prompts, too."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = (torch.tensor(rewards, dtype=torch.float).std() > 0.0) & (samples[0].group_index > 1)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def drop_but_do_not_begin_more(args, samples: list[Sample], **kwargs):
    return DynamicFilterOutput(keep=False, reason="dull", keep_when_insufficient=True)


async def split_into_segments(args, sample: Sample, sampling_params: dict) -> list[Sample]:
    """Two training samples of one execution, as slime's guide to customization shows."""
    sample = await load_function("instep.rollout.vllm_rollout.generate")(args, sample, sampling_params)
    rollout_id = sample.rollout_id if sample.rollout_id is not None else sample.index
    segments = []
    for length in (1, sample.response_length):
        segment = copy.copy(sample)
        segment.tokens = sample.tokens[: sample.prompt_length + length]
        segment.response_length, segment.loss_mask = length, sample.loss_mask[:length]
        segment.rollout_log_probs, segment.weight_versions = sample.rollout_log_probs[:length], []
        segment.reward = sample.effective_response_length / 2
        segment.status, segment.rollout_id = Sample.Status.COMPLETED, rollout_id
        segments.append(segment)
    return segments


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """A whole rollout over the default one, as in slime's multi_agent and delta examples."""
    output = default_rollout(args, rollout_id, data_source, evaluation=evaluation)
    return output if evaluation else RolloutFnTrainOutput(samples=output.samples, metrics={"mine": 1.0})


def process_all_samples(args, all_samples, data_source):
    """slime hands over the bound `get_samples`; here it is the data source, which may be called likewise."""
    extra = data_source(1)
    data_source.drop(extra, "looked at")
    seen.append((sorted(group[0].group_index for group in all_samples), extra[0][0].group_index))


TOKENIZER = None


async def guides_generate(args, sample: Sample, sampling_params) -> Sample:
    """The example of slime's usage guide ("Custom Rollout Function"), word for word."""
    from transformers import AutoTokenizer

    global TOKENIZER
    if TOKENIZER is None:
        TOKENIZER = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)

    # send request to router
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "text": sample.prompt,
            "sampling_params": sampling_params,
        },
    )

    prompt_tokens_ids = TOKENIZER(sample.prompt, add_special_tokens=False)["input_ids"]
    response_token_ids = TOKENIZER(output["text"], add_special_tokens=False)["input_ids"]

    # set sample
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.truncated = output["meta_info"]["finish_reason"]["type"] == "length"
    sample.response = output["text"]
    sample.aborted = output["meta_info"]["finish_reason"]["type"] == "abort"

    return sample


async def slimes_generate(args, sample: Sample, sampling_params) -> Sample:
    """The request of slime's own generate function, and what it does with the answer."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = tokenizer_of(args).encode(sample.prompt, add_special_tokens=False)
    sampling_params["max_new_tokens"] -= sample.response_length
    payload = {"sampling_params": sampling_params, "return_logprob": True, "input_ids": prompt_ids}
    sample.tokens = sample.tokens or prompt_ids
    output = await post(url, payload, headers=None)
    items = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in items],
        log_probs=[item[0] for item in items],
        trainable=True,
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample
