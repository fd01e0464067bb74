"""Flags of Atropos' example trainer and of TRL's server that their users may try in instep."""

from instep.arguments.flag import read_flags

_ENVIRONMENT = "a flag of an Atropos environment", "the environment's own command line (docs/neighbours/atropos.md)"
GROUPS = (
    read_flags(
        __file__,
        atropos="a flag of Atropos' example trainer, which `instep atropos-train` takes",
        server="a flag of a generation server; `instep vllm-serve` accepts those of TRL unchanged",
    ),
)
# The first parts of flags: why, and the replacement.
FAMILIES = (
    ("--openai.", *_ENVIRONMENT),
    ("--env.", *_ENVIRONMENT),
    ("--slurm", _ENVIRONMENT[0], "--cluster ray (docs/cluster.md)"),
)
