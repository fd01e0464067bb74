"""The arguments of each role (actor, critic), and the file of `--megatron-config-path` that overrides them:

megatron:
  - name: default
    role: critic          # or actor; each at most once
    overrides: {lr: 1e-5, save: runs/mine/critic}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from instep.arguments.all_flags import find, own_flags
from instep.arguments.args import Args
from instep.arguments.concern import Problem, Settings, flag_name, ranks_of_a_copy, read_yaml
from instep.arguments.flag import Flag, attribute_name
from instep.arguments.optimizer import OPTIMIZER
from instep.cluster.placement import num_critic_gpus

ROLES = ("actor", "critic")
# Attributes with a separate flag for the critic.
CRITIC_FLAGS = {name: f"critic_{name}" for name in ("lr", "lr_warmup_iters", "load", "save")}
_MORE = ("--load", "--save", "--recompute-granularity", "--recompute-method", "--recompute-num-layers")


def args_of_role(args: Args, role: str) -> Args:
    """Return the arguments of a role's workers. Those of the actor are the arguments of the run."""
    if role == "actor":
        return args
    ranks = num_critic_gpus(args)
    own = {
        "lr": args.lr if args.critic_lr is None else args.critic_lr,
        "lr_warmup_iters": args.critic_lr_warmup_iters,
        "lr_warmup_fraction": None,
        "world_size": ranks,
        "dp_size": max(1, ranks // ranks_of_a_copy(args)),
    }
    return args.replace(**{**own, **args.megatron_config.get("critic", {})})


def overridable() -> dict[str, Flag]:
    """Return the flags that a role may override, by attribute."""
    more = (own_flags()[name] for name in _MORE)
    return {flag.attribute: flag for flag in (*OPTIMIZER.flags, *more) if flag.status == "acts"}


def read_roles(args: Settings, given: dict[str, Any]) -> Iterator[Problem]:
    """Set in `args` and `given` what the file overrides. Critic values without a flag go to `args.megatron_config`."""
    args.megatron_config = {}
    if args.megatron_config_path is None:
        return
    where = f"--megatron-config-path {args.megatron_config_path}"
    content = read_yaml(args.megatron_config_path, where)
    entries = content.get("megatron")
    if not isinstance(entries, list):
        remedy = "write megatron: [{name: default, role: critic, overrides: {...}}]"
        yield Problem("has no list `megatron`", where, remedy)
        return
    yield from _unknown(content, ("megatron",), where)
    for index, entry in enumerate(entries):
        place = f"{where}, megatron[{index}]"
        if not isinstance(entry, dict) or entry.get("role") not in ROLES:
            named = isinstance(entry, dict) and "role" in entry
            what = f"{entry['role']!r} is not a role" if named else "has no role"
            yield Problem(what, place, f"write role: {', or role: '.join(ROLES)}")
            continue
        yield from _unknown(entry, ("name", "role", "overrides"), place)
        role, overrides = entry["role"], entry.get("overrides") or {}
        if role in args.megatron_config:
            yield Problem(f"is a second entry for the {role}", place, "put all overrides of a role into one entry")
        elif not isinstance(overrides, dict):
            yield Problem("overrides are not names with values", place, "write overrides: {lr: 1e-5}")
        else:
            args.megatron_config[role] = {}
            for name, value in overrides.items():
                yield from _override(args, given, role, str(name), value, f"{place}.overrides.{name}")


def _override(args: Settings, given: dict[str, Any], role: str, name: str, value: Any, where: str) -> Iterator[Problem]:
    flags, attribute = overridable(), attribute_name(name)
    if attribute not in flags:
        flag, near = find(flag_name(attribute)), difflib.get_close_matches(attribute, flags, n=1)
        if flag is not None and flag.status == "acts":
            yield Problem("is the same for both roles", where, f"give {flag.name} on the command line")
        else:
            known = ", ".join(flags)
            yield Problem("is unknown", where, f"did you mean {near[0]}?" if near else f"a role may set {known}")
        return
    try:
        converted = _convert(flags[attribute], value)
    except ValueError as error:
        yield Problem(f"{value!r} {error}", where, f"its meaning: {flags[attribute].help}")
        return
    own = attribute if role == "actor" else CRITIC_FLAGS.get(attribute)
    if own is None:
        args.megatron_config[role][attribute] = converted
    elif role == "critic" and own in given:
        yield Problem(f"{flag_name(own)} sets it, too", where, "give one of the two")
    else:
        setattr(args, own, converted)
        given[own] = converted


def _convert(flag: Flag, value: Any) -> Any:
    if flag.is_switch:
        if not isinstance(value, bool):
            raise ValueError("is neither true nor false")
        return value
    if isinstance(value, (bool, dict, list)) or value is None:
        raise ValueError(f"is not {flag.type_label}")
    return flag.convert(str(value))


def _unknown(content: dict[Any, Any], known: tuple[str, ...], where: str) -> Iterator[Problem]:
    for key in content:
        if key not in known:
            yield Problem("is unknown", f"{where}: {key}", f"known are {', '.join(known)}")
