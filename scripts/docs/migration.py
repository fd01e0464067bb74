"""docs/migration.md: what the flags of slime, vime, TRL and verl are here.

`python scripts/docs/migration.py > docs/migration.md` writes it. What slime and vime say comes from the flag table;
TRL, verl and OpenRLHF have tables (`instep_neighbours/settings.py`), in which the status of a setting is that of
the flags that it names.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.all_flags import own_flags
from instep_neighbours.settings import OPENRLHF, TRL, TRL_DPO, VERL, Row
from instep_neighbours.slime import SLIME as MODULES


def markdown() -> str:
    """docs/migration.md."""
    lines = [
        "# Coming from slime, vime, TRL or verl",
        "",
        "Made by `python scripts/docs/migration.py > docs/migration.md`; do not edit.",
        "",
        "*acts*: give the flag. *accepted*: it is read as another flag, or changes nothing; a line says so. "
        "*later*: the flag is known and refused today, with the reason. *refused*: it will not act. "
        "*none*: there is no flag; the note says what there is instead.",
        "",
        *_slime_and_vime(),
        *_hooks(),
        "## TRL: GRPOConfig 1.16",
        "",
        "On the command line. In a script `instep.train` takes the names of TRL, every field of `GRPOConfig` and "
        "`reward_funcs`: [neighbours/trl_config.md](neighbours/trl_config.md).",
        "",
        *_table(TRL),
        "",
        "Where `DPOConfig` differs, for `instep dpo`:",
        "",
        *_table(TRL_DPO),
        "",
        "A reward function of TRL's, which has a parameter `completions`, is called as TRL calls it "
        "([rewards.md](rewards.md#functions-in-trls-form)); `async def reward(args, sample)` gets one sample "
        "(`sample.prompt`, `sample.response`, `sample.label`, `sample.metadata`), or a group with `--group-rm`.",
        "",
        "## verl 0.9",
        "",
        *_table(VERL),
        "",
        "verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` becomes `async def reward(args, "
        "sample)` with `sample.response`, `sample.label` and `sample.metadata`.",
        "",
        "## OpenRLHF: train_ppo_ray",
        "",
        "The name of today, or that of before 0.9.",
        "",
        *_table(OPENRLHF),
        "",
    ]
    return "\n".join(lines)


def _slime_and_vime() -> Iterator[str]:
    flags = [f for f in dict.fromkeys(own_flags().values()) if set(f.whose) & set("VRSC")]
    other = [f for f in flags if f.status != "acts"]
    yield "## slime and vime"
    yield ""
    yield (
        f"Flags keep their names: {len(flags) - len(other)} of {len(flags)} act as they are named "
        "([arguments.md](arguments.md) has them with their defaults; `--n-samples-per-prompt` is 8, in slime 1). Those "
        "below do not. `--vllm-*`, `--sglang-*` and `--router-*` take every flag of vLLM, of SGLang and of the router "
        "([engines_flags.md](engines_flags.md)): slime's `--sglang-*` mean `--rollout-backend sglang`. Those below are "
        "how `--rollout-backend vllm` and `embedded` read them; with these, others of SGLang are refused, too. "
        "Megatron's flags are in [arguments.md](arguments.md), too."
    )
    yield ""
    yield "| flags | status | why | instead |"
    yield "|---|---|---|---|"
    for status in ("accepted", "later", "refused"):
        same: dict[tuple[str, str], list[str]] = {}
        for f in other:
            if f.status == status:
                same.setdefault((f.note, f.read_as or f.instead), []).append(f"`{f.name}`")
        yield from (_cells(", ".join(names), status, *row) for row, names in same.items())
    yield ""


def _hooks() -> Iterator[str]:
    yield "### Hooks"
    yield ""
    yield (
        "Hooks keep their signatures, and `Sample` slime's `get_reward_value`, `effective_response_length`, "
        "`append_response_tokens` and `rollout_id` (it has no `spec_info` and `prefix_cache_info`, and "
        "`weight_versions` are spans of tokens: a number that a hook appends there is taken for the version of the "
        "tokens after the last span). The generate function of vime's usage guide, and hooks of the "
        "shapes of slime's examples (several turns with a tool and `sample.append_response_tokens(args, tokens=..., "
        "log_probs=..., trainable=..., meta_info=...)`, rewards, filters, segments of one execution, whole rollouts "
        "over the default one, corrections, reducers, losses) run in instep's tests: `args.sglang_router_ip`, "
        "`args.sglang_router_port` and `args.sglang_model_routers` are the "
        "run's own, and its engines, the embedded one and vLLM with the plugin, answer SGLang's `/generate` "
        "([engines.md](engines.md#sglangs-generate)), so that the generate function of slime's usage guide runs as "
        "it stands there. `await instep.rollout.vllm_rollout.generate(args, sample, sampling_params)` appends one "
        "turn without a request of your own. `GenerateState(args)` has `tokenizer` and `sampling_params`; its "
        "`semaphore` and `aborted` are left out, as a run bounds its requests, and ends them, by itself (slime's guide "
        "and examples read neither; `slime.rollout.sglang_streaming_rollout`, which reads `aborted`, is not here). A "
        "reward function gets what it gets in slime: one sample, with `--group-rm` a list, and the siblings of a "
        "fan-out as a list if its second parameter is named `samples` or is a list by its annotation (one that takes a "
        "`Sample` is called once for each). slime's `train_async.py` with `generate_rollout_fully_async` is `instep "
        "train-async --max-staleness N`, without a rollout function ([async.md](async.md))."
    )
    yield ""
    yield (
        "Engines and routers ask for the run's key ([security.md](security.md)), which slime's do not. "
        "`instep.rollout.http.post` and `get` send it. A hook that posts with a client of its own (aiohttp, httpx, "
        "requests, openai) adds the header `Authorization: Bearer {instep.rollout.http.api_key(url)}`, or gets an "
        "answer 401; `--no-api-key` lets it stay as it is."
    )
    yield ""
    yield (
        "Of slime's examples, `multi_agent` sets attributes of `args`, which are read-only here: pass these values on "
        "as arguments of your own functions. `geo3k_vlm_multi_turn` needs images, which come later. `slime.agent` "
        "(adapters, harnesses and sandboxes of `coding_agent_rl`) is not here: run the agent in a generate function, "
        "and append what the engine sampled with `sample.append_response_tokens`. `--spec` takes a layer spec of your "
        "own ([hooks.md](hooks.md#--spec)); leave it out where it names `slime_plugins.models`: the families that "
        "instep knows ([models.md](models.md)) are built from config.json."
    )
    yield ""
    yield "Hooks import these under slime's (or vime's) names, too, where that is not installed."
    yield ""
    yield "| slime | here |"
    yield "|---|---|"
    for theirs, (module, names) in MODULES.items():
        yield _cells(f"`{theirs}`", f"`{module}`: " + ", ".join(f"`{name}`" for name in names.split()))
    yield ""


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    yield "| theirs | default | here | status | note |"
    yield "|---|---|---|---|---|"
    for row in rows:
        here = f"`{row.here}`" if row.here else ""
        yield _cells(f"`{row.name}`", row.default, here, row.status, row.note)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
