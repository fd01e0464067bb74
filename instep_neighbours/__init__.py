"""Support for unmodified programs of other projects; the core does not name them."""

from instep.system.hooks.neighbours import Addition, Command

TRL = Addition(
    commands={
        "vllm-serve": Command(
            "`serve` with the command line of `trl vllm-serve`, open to TRL's clients without a key",
            "instep_neighbours.trl.serve:vllm_serve",
            starts=True,
        )
    },
    call="instep_neighbours.trl.config:as_flags",
    before_engines="instep_neighbours.trl.serve:port_of_serve",
    settings="instep_neighbours.settings:settings",
)
ATROPOS = Addition(
    commands={
        "env-api": Command(
            "the API from which a run gets groups of Atropos' environments", "instep_neighbours.atropos.env_api:main"
        ),
        "atropos-train": Command(
            "Atropos' example trainer, with its command line, as a run", "instep_neighbours.atropos.trainer:main"
        ),
        "atropos-serve": Command(
            "the vLLM server of Atropos' example trainer, with its command line",
            "instep_neighbours.atropos.server:main",
        ),
    },
    flags="instep_neighbours.refused_flags:GROUPS",
    families="instep_neighbours.refused_flags:FAMILIES",
)
VERIFIERS = Addition(
    flags="instep_neighbours.environment:GROUPS",
    resolvers="instep_neighbours.environment:RESOLVERS",
    rules="instep_neighbours.environment:RULES",
)
SLIME = Addition(modules="instep_neighbours.slime:MODULES")
