"""docs/neighbours/trl_config.md: TRL's configuration in `instep.train`.

`python scripts/docs/grpo_config.py > docs/neighbours/trl_config.md` writes it, the tables from
`instep_neighbours/trl/fields.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from instep_neighbours.trl.fields import FIELDS, TRAINER, Field

TEXT = """\
# A GRPOTrainer script, run by instep

Made by `python scripts/docs/grpo_config.py > docs/neighbours/trl_config.md`; do not edit.

You have a script that makes a `GRPOTrainer`. `instep.train` takes what it takes, under the same names:

```python
import instep


def right(completions, answer, **kwargs):
    return [float(answer in c[0]["content"]) for c, answer in zip(completions, answer)]


summary = instep.train(
    model="Qwen/Qwen3-4B",  # or a folder
    reward_funcs=right,  # or a list of functions
    train_dataset=dataset,  # a datasets.Dataset, or a list of dicts, with a column prompt
    learning_rate=1e-6,  # fields of GRPOConfig as keywords, or args=GRPOConfig(...)
    num_generations=8,
    gradient_accumulation_steps=4,
    beta=0.0,
    max_steps=500,
    output_dir="runs/mine",
    train_backend="hf",  # and any flag of instep's own
)
```

`for step in instep.Run(...)` takes the same and gives you the loop ([python.md](../python.md));
`command="train-async"` generates meanwhile. TRL itself is not needed, and not imported; a `GRPOConfig` object of TRL
1.10 to 1.16 may be given as `args`, as may a dict of its fields.

- With `reward_funcs`, `train_dataset`, `eval_dataset` or `args`, what you do not give has **TRL's default**:
  `loss_type` is dapo, `weight_decay` 0, `seed` 42. Three defaults that say how, not what, stay instep's: `bf16`,
  `gradient_checkpointing` and `vllm_gpu_memory_utilization`, which the plan chooses.
- A flag of instep's wins over a default of TRL's. Beside a field that you give and that says the same
  (`learning_rate` and `lr`) it is an error, as is what the table calls *not here* with another value than its
  default. Every error names the field.
- `per_device_train_batch_size` counts completions, as there, and "device" is a data-parallel rank:
  `actor_num_gpus_per_node x actor_num_nodes / (TP x PP x CP)`; 1 on a CPU, 8 GPUs unless you say otherwise.
- Columns of the dataset reach the reward functions as keywords, a list each; `completions` are lists of one message
  where prompts are messages (the chat template is then applied), else texts. A function is called for a group at a
  time, not for the whole batch, and without `trainer_state`, `log_extra` and `log_metric`. A function among several
  may return None for a sample: the sum is over the others. If all do, that is an error here.
- Of several functions, each reward is in `samples.jsonl` under the function's name, and `reward` is the weighted sum.
- With one optimizer step per rollout (TRL's default too) the loss is TRL's: the same mean, the same advantages but
  for the number that is added to the std (1e-6, there 1e-4). What differs else is in the notes.

"""


PROVEN = """
## What is proven

- `make test-peers` compares with TRL 1.16 itself: names and defaults of the fields, the batches of `GRPOConfig`
  objects, and for every `loss_type` above, with clips, KL and corrections, value and gradient of
  `GRPOTrainer._compute_loss` in float64.
- `make test-neighbours` trains the quickstart's task (`examples/quickstart`: 20 steps of 32 prompts x 8 completions
  on a CPU, float32, from one SFT checkpoint, `loss_type` grpo) in all ways, to the same reward within 0.05. Mean
  reward of the last five steps, of one run each with one seed; the first step has 0.35 to 0.41:

| trainer | generation | reward |
|---|---|---|
| TRL 1.10 and 1.16 | transformers, in TRL's process | 0.957 |
| TRL 1.10 | `instep vllm-serve`, embedded engine | 0.973 |
| TRL 1.16 | `instep vllm-serve`, embedded engine | 0.963 |
| `instep.train` with the same fields | embedded engine | 0.962 |

- On the CPU TRL's clients need a stand-in for vLLM and CUDA (`tests/neighbours/stub_vllm`, `cpu_as_cuda.py`); TRL
  itself is as its wheel has it.
- Not proven: that two runs of different length, model or seed stay as close; `vllm_mode="colocate"` and its
  neighbours on GPUs, which become flags that are tested by themselves.
"""


def markdown() -> str:
    """The page."""
    lines = [TEXT + "## Arguments of GRPOTrainer", "", *_table(TRAINER, defaults=False), ""]
    acting = [field for field in FIELDS if field.kind == "acts"]
    lines += [f"## The {len(FIELDS)} fields of GRPOConfig", "", f"{len(acting)} act:", "", *_table(acting), ""]
    for kind, title in (("changes nothing", "change nothing here"), ("not here", "are not here")):
        fields = [field for field in FIELDS if field.kind == kind]
        lines += [f"{len(fields)} {title}:", "", "| fields | why |", "|---|---|"]
        for note, group in groupby(fields, key=lambda field: field.note):
            names = ", ".join(f"`{field.name}`" for field in group)
            lines.append(f"| {names} | {note} |")
        lines.append("")
    return "\n".join(lines) + PROVEN


def _table(fields: tuple[Field, ...] | list[Field], defaults: bool = True) -> Iterator[str]:
    yield "| field | TRL's default | flags of instep | |" if defaults else "| argument | | flags of instep | |"
    yield "|---|---|---|---|"
    for field in fields:
        here = f"`{field.here}`" if field.here else ""
        yield f"| `{field.name}` | {f'`{field.default!r}`' if defaults else field.kind} | {here} | {field.note} |"


if __name__ == "__main__":
    print(markdown(), end="")
