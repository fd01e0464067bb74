"""docs/hooks.md, made from this table and examples/: `python scripts/docs/hooks.py > docs/hooks.md`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import hooks
from instep.arguments.all_flags import find, groups
from instep.arguments.flag import Flag
from instep.arguments.flag import hook as hook_type

MODULE = "examples.hooks"
EVAL_CONFIG = Path(hooks.__file__).with_name("eval.yaml")


@dataclass(frozen=True)
class Entry:
    """A flag that takes a function.

    Attributes:
        example: the name of a function or class in examples/hooks.py.
        when: when it is called, and with what.
        returns: what it may return.
        refused: what is an error, beside what it raises.
        more: flags that its example needs, for tests and for the document.
    """

    flag: str
    example: str
    when: str
    returns: str
    refused: str = ""
    more: str = ""


_SAMPLE = "a Sample whose tokens, mask and log-probs fit each other"
ENTRIES = (
    Entry(
        "--data-source-path",
        "DataSource",
        "once, before the first rollout, as `cls(args)`; rollout functions then call `get_samples(num_groups)`, "
        "with `--partial-rollout` `add_samples(groups)`, and checkpoints `state_dict()` and "
        "`load_state_dict(state)` (or slime's `save(rollout_id)` and `load(rollout_id)`)",
        "`get_samples` returns a list of groups (lists of `Sample` with `group_index` and `index`), `state_dict` "
        "data that JSON can hold",
        "a source without these methods (`add_samples` and the state only where they are needed), groups that are "
        "empty or hold something else, samples without a `group_index`",
    ),
    Entry(
        "--rollout-function-path",
        "generate_rollout",
        "once per rollout, in a thread of the controller; with `evaluation=True` for evaluations, unless "
        "`--eval-function-path` is given",
        "`RolloutFnTrainOutput(samples, metrics)` or a list of groups; for an evaluation as `--eval-function-path`."
        " A group may nest lists: siblings of one fan-out",
        "a group given twice, an `execution_id` in two groups, samples whose columns do not fit, metrics that are "
        "no numbers",
    ),
    Entry(
        "--eval-function-path",
        "evaluate",
        "once per evaluation, with `data_source` and `evaluation=True`",
        "`RolloutFnEvalOutput(data, metrics)` or a dict by data set: `rewards`, `truncated`, `samples` (what is "
        "missing is read from `samples`)",
        "no data set, a data set without rewards, rewards that are no finite numbers",
        more="--eval-interval 1",
    ),
    Entry(
        "--custom-generate-function-path",
        "generate",
        "for each sample, on the rollout's asyncio loop; `sampling_params` is the call's own dict under slime's "
        "names, always with `max_new_tokens`; an `evaluation` keyword is passed if the signature has it. "
        "`--eval-config` may name one per data set (`custom_generate_function_path`)",
        "a Sample whose tokens, mask and log-probs fit each other, or a list of them: a fan-out, whose samples are "
        "one execution. `status` says how it ended; `ABORTED` gives the group back",
        "a sample whose status is still PENDING, columns of other lengths, log-probs that are not finite",
    ),
    Entry(
        "--rollout-sample-hook-path",
        "note_length",
        "after the generate function and before the reward, sample by sample, in the order in which the flag was "
        "given; sync or async; `rollout_id` and `evaluation` are passed if the signature has them",
        "nothing, or the sample, which may be another one",
        "anything else, or a sample whose columns do not fit",
    ),
    Entry(
        "--custom-rm-path",
        "reward",
        "for each finished sample without a reward, sync (then in a thread) or async, for at most "
        "`--reward-timeout` seconds; with `--group-rm` once per group with a list; for the siblings of a fan-out "
        "with a list if the second parameter is named `samples` or is a list by its annotation. A function with a "
        "parameter `completions` is called in TRL's form ([rewards.md](rewards.md)). `--eval-config` may name one "
        "per data set (`custom_rm_path`)",
        "a finite number (a tensor's or numpy's, too), or a dict of which `--reward-key` names an entry; for a list"
        " as many rewards",
        "no finite number, a list of another length, more than `--reward-timeout` seconds; a `FAILED` sample, which "
        "it is not asked about; a failed reward is never a zero: it ends the run, or with `--skip-failed-groups` drops "
        "the group",
        more="--reward-key score",
    ),
    Entry(
        "--dynamic-sampling-filter-path",
        "keep_mixed_groups",
        "for each group with its rewards; sync or async",
        "`DynamicFilterOutput(keep, reason, keep_when_insufficient)`, any object with `keep` and `reason`, or a bool",
        "anything else",
    ),
    Entry(
        "--buffer-filter-path",
        "newest_first",
        "when groups are wanted and the buffer holds some (`--partial-rollout`, `add_samples`); `rollout_id` is "
        "None, as in slime",
        "at most `num_groups` groups, which it has taken out of `buffer`",
        "more groups, or something that is no group",
        more="--partial-rollout",
    ),
    Entry(
        "--rollout-sample-filter-path",
        "leave_out_truncated",
        "once per rollout with the groups that are kept; what it marks with `remove_sample` is not trained on, but "
        "counts in the statistics of its group",
        "nothing",
    ),
    Entry(
        "--rollout-all-samples-process-path",
        "count_all",
        "once per rollout with all groups that were finished, those that a filter has dropped among them; the third"
        " argument is the data source, which may also be called as slime's `get_samples`",
        "nothing",
    ),
    Entry(
        "--custom-reward-post-process-path",
        "rank_rewards",
        "once per rollout, in place of the comparison within groups",
        "`(raw_rewards, rewards)`, a finite number of each per sample",
        "other lengths, values that are not finite",
    ),
    Entry(
        "--custom-convert-samples-to-train-data-path",
        "convert",
        "once per rollout, in place of instep's own conversion",
        "a dict of lists with an entry per sample: `tokens`, `response_lengths`, `loss_masks`, `rewards`, "
        "`rollout_ids`, and what else the loss needs",
        "a key that is missing, lists of other lengths",
    ),
    Entry(
        "--custom-advantage-function-path",
        "constant_advantages",
        "once per rollout, in the controller, in place of the estimator; `rollout_data` has slime's names",
        'nothing: it sets `rollout_data["advantages"]` (and `returns`, which a critic needs), a tensor '
        "`[response_length]` per sample",
        "none set, other shapes, advantages that are not finite",
    ),
    Entry(
        "--rollout-data-postprocess-path",
        "mask_first_token",
        "on every rank of the actor, before its optimizer steps, with log-probs and advantages; it must do the same"
        " on ranks with the same samples",
        "nothing: it changes `rollout_data` in place (`loss_masks`, `advantages`, `log_probs`, columns of your own,"
        " which reach a custom loss)",
        "other tokens or lengths, a column removed, a mask that trains on more than before (its denominators stay "
        "those of the rollout)",
    ),
    Entry(
        "--custom-tis-function-path",
        "truncated_weights",
        "in the loss of each micro-batch, with keywords",
        "`(pg_loss, masks, metrics)`: `[num_tokens]`, one mask per sample, metrics `[num_tokens]` each",
        "other shapes, a metric with a name of instep's",
        more="--use-tis",
    ),
    Entry(
        "--custom-pg-loss-reducer-function-path",
        "sum_over_length",
        "in the loss of each micro-batch",
        "a function from `[num_tokens]` to a scalar, which is divided by the number of executions of the step",
        "something that cannot be called, or no scalar",
    ),
    Entry(
        "--custom-loss-function-path",
        "reinforce",
        "in place of the whole loss of each micro-batch; `logits` are float32 `[1, num_tokens, vocab_size]` before "
        "the temperature; `reducer` sums over executions the means of their tokens",
        "`(loss, metrics)`: a scalar with a gradient, and scalars by name",
        "no scalars",
        more="--loss-type custom_loss",
    ),
    Entry(
        "--custom-rollout-log-function-path",
        "log_rollout",
        "once per rollout, in the controller",
        "true: instep logs no metrics of its own of this rollout",
        "an async function",
    ),
    Entry(
        "--custom-eval-rollout-log-function-path",
        "log_evaluation",
        "once per evaluation, in the controller; `data` is by data set as `--eval-function-path` returns it",
        "true: instep logs nothing itself",
        "an async function",
    ),
    Entry(
        "--custom-model-provider-path",
        "freeze_first_layer",
        "on every rank with `--train-backend megatron`, for each chunk of the model, also for reference and critic",
        "the model of `instep.training.megatron.hooks.model_provider`, changed or not",
        "another model",
        more="--train-backend megatron",
    ),
    Entry(
        "--spec",
        "layer_spec",
        "on every rank with `--train-backend megatron`, for each chunk of the model, also for reference and critic; "
        "`config` is Megatron's `TransformerConfig` of the model, `vp_stage` is passed if the signature has it",
        "a `ModuleSpec`, which all layers have, or `TransformerBlockSubmodules` with one for each layer of the chunk. "
        "Megatron's own attention over queries, keys and values, norms, routers and experts in it become instep's, "
        "which take packed sequences, whatever parameters and submodules the plain ones were given: derive a class to "
        "change one. That attention applies the rotary embedding, too. What Transformer Engine makes "
        "is not for instep's trainer",
        "anything else (a function that builds a whole model is for `--custom-model-provider-path`), and layers whose "
        "parameters have other names than Megatron's: weights are read and sent by them",
        more="--train-backend megatron",
    ),
    Entry(
        "--custom-megatron-init-path",
        "megatron_started",
        "on every rank, once Megatron's process groups stand and before the model is built",
        "nothing",
        more="--train-backend megatron",
    ),
    Entry(
        "--custom-megatron-before-log-prob-hook-path",
        "before_log_probs",
        'on every rank, before log-probs are computed; `store_prefix` is "", "ref_" or "teacher_", `model` the list'
        " of this rank's modules",
        "nothing",
        more="--train-backend megatron",
    ),
    Entry(
        "--custom-megatron-before-train-step-hook-path",
        "before_train_step",
        "on every rank, before the gradients of each optimizer step, which are zero then; the scheduler is None",
        "nothing",
        more="--train-backend megatron",
    ),
)
_HEAD = """\
# Hooks

Made by `python scripts/docs/hooks.py > docs/hooks.md`; do not edit.

Functions of yours by dotted path, in the folder that a run starts in or on `PYTHONPATH`: `--custom-rm-path my.f`.
They have slime's and vime's signatures ([migration.md](migration.md#hooks) has their import paths). `args` are a run's
settings, read-only, under the names of their flags, and what it has found out: `args.vllm_router_ip` and
`args.vllm_router_port` (also as `args.sglang_router_ip`, `args.sglang_router_port`), `args.rollout_engine_urls`,
`args.vllm_model_routers`.

Whatever a hook raises, and a return value that cannot be used, is one error with the flag, the function, its file and
line, and the sample, group or rollout that it was called for. Before anything expensive starts, hooks of rollouts are
tried on four prompts ([debugging.md](debugging.md#the-trial-of-hooks)). In the controller torch has one
thread; a hook that runs a model on its CPUs calls `torch.set_num_threads` itself. The examples are those of
[examples/hooks.py](../examples/hooks.py), which instep's tests run.
"""


_TAIL = """## Hooks of one evaluation set

`custom_rm_path` and `custom_generate_function_path` of a data set in an `--eval-config`
([evaluation.md](evaluation.md)) are called as `--custom-rm-path` and `--custom-generate-function-path` are, and in
their place, for the samples of this set. [examples/eval.yaml](../examples/eval.yaml):

```yaml
{}```
"""


def acting() -> list[Flag]:
    """The flags that take a function."""
    return [f for group in groups() for f in group.flags if f.type is hook_type and f.status == "acts"]


def markdown() -> str:
    tail = _TAIL.format(EVAL_CONFIG.read_text())
    return "\n".join([_HEAD, *(line for entry in ENTRIES for line in _section(entry)), tail])


def _section(entry: Entry) -> Iterator[str]:
    flag, example = find(entry.flag), getattr(hooks, entry.example)
    assert flag is not None
    yield f"## `{entry.flag}`"
    yield ""
    yield f"`{_signature(entry.example)}`" + ("; may be given several times" if flag.append else "")
    yield ""
    yield f"- called: {entry.when}."
    yield f"- returns: {entry.returns}."
    if entry.refused:
        yield f"- refused: {entry.refused}."
    if flag.default and isinstance(flag.default, str):
        yield f"- default: `{flag.default}`."
    yield ""
    yield "```python"
    yield f"# {' '.join(filter(None, (entry.flag, _named(flag, entry.example), entry.more)))}"
    yield inspect.getsource(example).rstrip()
    yield "```"
    yield ""


def _named(flag: Flag, example: str) -> str:
    return f"{MODULE} {example}" if flag.nargs == "2" else f"{MODULE}.{example}"


def _signature(name: str) -> str:
    """How the hook is called, as its example declares it."""
    example = getattr(hooks, name)
    if inspect.isclass(example):
        return "cls(args)"
    text = re.sub(r"\s+", " ", str(inspect.signature(example)))
    return f"{'async ' if inspect.iscoroutinefunction(example) else ''}f{text}"


if __name__ == "__main__":
    print(markdown(), end="")
