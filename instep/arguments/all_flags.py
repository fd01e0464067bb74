"""All flags in one table, and how a name on the command line is found in it."""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

from instep.arguments.algorithm.flags import ALGORITHM
from instep.arguments.asynchronous import ASYNCHRONOUS
from instep.arguments.cluster import CLUSTER
from instep.arguments.concern import Settings
from instep.arguments.data import DATA
from instep.arguments.debugging import DEBUGGING
from instep.arguments.engine import ENGINE
from instep.arguments.engine_flags import find_engine_flag
from instep.arguments.evaluation import EVAL
from instep.arguments.extra import of_user
from instep.arguments.flag import Flag, FlagGroup, hook, read_flags
from instep.arguments.loggers import LOGGERS
from instep.arguments.lora import LORA
from instep.arguments.megatron import SHAPE, megatron_table
from instep.arguments.model import MODEL
from instep.arguments.optimizer import OPTIMIZER
from instep.arguments.parallel import PARALLEL
from instep.arguments.reward import REWARD
from instep.arguments.rollout import ROLLOUT
from instep.system.hooks.neighbours import added, is_own

# Concerns without resolvers and rules.
NOT_SGLANG, NOT_VLLM = "the engine is vLLM, not SGLang", "the engine is SGLang, not vLLM"
TIMEOUTS, SGLANG = (read_flags(str(Path(__file__).with_name(name)), note=NOT_SGLANG) for name in ("timeouts", "sglang"))
_OWN: tuple[FlagGroup, ...] = (
    *(MODEL, DATA, ROLLOUT, REWARD, EVAL, ALGORITHM, OPTIMIZER, LORA, ASYNCHRONOUS, CLUSTER, ENGINE, PARALLEL, SHAPE),
    *(LOGGERS, TIMEOUTS, DEBUGGING, SGLANG),
)
# How flags of SGLang and vLLM are read if the engines are SGLang's.
SGLANG_ENGINES = read_flags(str(Path(__file__).with_name("sglang_engines")), note=NOT_VLLM)

# Flags that are refused by their prefix: prefix, note, and what to use instead.
_FAMILIES = (("--sglang-", NOT_SGLANG, "the --vllm- flag of the same meaning (docs/engines_flags.md)"),)


@cache
def groups() -> tuple[FlagGroup, ...]:
    """Return all flags. Those of neighbours come last."""
    return _OWN + tuple(chain.from_iterable(added("flags")))


@cache
def families() -> tuple[tuple[str, str, str], ...]:
    return _FAMILIES + tuple(chain.from_iterable(added("families")))


@cache
def own_flags(*, sglang: bool = False) -> dict[str, Flag]:
    """Return the flags of `groups()`, by each of their names.

    Args:
        sglang: as they are read if the engines are SGLang's.
    """
    here = [*(group for group in groups() if group is not SGLANG), SGLANG_ENGINES] if sglang else groups()
    return {name: flag for group in here for flag in group.flags for name in (flag.name, *flag.aliases)}


def own_hooks(args: Settings) -> list[tuple[str, str]]:
    """Return the user's functions that `args` names: flag and dotted path of each."""
    found = []
    for flag in (flag for group in groups() for flag in group.flags if flag.type is hook):
        value = vars(args).get(flag.attribute)
        for path in value if isinstance(value, list) else [value]:
            if path and path != flag.default and not is_own(path):
                found.append((flag.name, path))
    return found


@cache
def passed_through() -> dict[str, Flag]:
    """Return the flags that only Megatron's table has, by each of their names."""
    own = own_flags()
    return {name: flag for flag in megatron_table() for name in (flag.name, *flag.aliases) if name not in own}


def find(name: str, *, sglang: bool = False) -> Flag | None:
    """Return the record of a flag; None for an unknown one. The name may have underscores instead of dashes.

    The search goes through instep, the user's `train.py`, Megatron, the engine, its router and the refused prefixes.

    Args:
        sglang: whether the engines are SGLang's.
    """
    flag = own_flags(sglang=sglang).get(name) or of_user().get(name) or passed_through().get(name)
    flag = flag or find_engine_flag(name, sglang=sglang)
    if flag is None:
        for prefix, note, instead in families():
            if name.startswith(prefix) and not (sglang and prefix == "--sglang-"):
                return Flag(name, status="refused", note=note, instead=instead)
    own, dot, key = name.partition(".")  # the key of a JSON value keeps its underscores
    return find(own.replace("_", "-") + dot + key, sglang=sglang) if flag is None and "_" in own else flag
