"""The topology: which groups of engines serve which models, by `--vllm-config`, `--sglang-config` or simple flags.

The file has the form of vime's guide, and with the key `sglang` that of slime:

    vllm:
      - name: actor
        server_groups:
          - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 4}
      - name: ref
        model_path: models/ref
        update_weights: false
        server_groups:
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_model_len: 4096}}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from instep.arguments.settings import EngineSettings, ModelSettings, Settings
from instep.engines.dialect import VLLM, Dialect, dialect_of
from instep.engines.flags import TITLES, FlagTable, engine_words, flag_table, merge, nearest_name
from instep.engines.reserved_flags import reserved
from instep.errors import ConfigError
from instep.system.documents import parse_yaml

ServerRole = Literal["regular", "prefill", "decode", "placeholder"]
ROLES: tuple[ServerRole, ...] = ("regular", "prefill", "decode", "placeholder")
POLICY = "actor"  # the name of the only model of a run without --vllm-config
_MODEL_KEYS = ("name", "model_path", "update_weights", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
MAX_GPUS = 2**15  # of a plan, which has an entry for each GPU
_NUM_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?i?)")  # as flags of the kinds "size" and "si_size"


@dataclass(frozen=True)
class ServerGroup:
    """A group of engines of one role and size.

    Attributes:
        overrides: words for the engine's command line, by field; they replace those of the command line.
    """

    role: ServerRole
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.role == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ServedModel:
    """One model and its groups of engines, behind one router.

    Attributes:
        path: a Hugging Face folder; None: that of `--hf-checkpoint`.
        where: the flag, or the key in the file, that describes the model, for errors.
    """

    name: str
    groups: tuple[ServerGroup, ...]
    path: str | None = None
    update_weights: bool = True
    where: str = "--rollout-num-gpus-per-engine"

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether separate engines run prefill and decode."""
        return any(group.role == "prefill" for group in self.groups)


def served_models(args: Settings) -> tuple[ServedModel, ...]:
    """Return the models of a run: those of the file, or the one that the flags describe.

    Raises:
        ConfigError: the first error in the file.
    """
    size = args.rollout_num_gpus_per_engine
    if args.vllm_topology is not None:
        models, errors = parse(args.vllm_topology, file_of(args), size, args.hf_checkpoint, dialect_of(args))
        if errors:
            raise errors[0]
        return models
    num_gpus, prefill = args.rollout_num_gpus, (args.prefill_num_servers or 0) * size
    groups = [ServerGroup("prefill", prefill, size), ServerGroup("decode", num_gpus - prefill, size)]
    return (ServedModel(POLICY, tuple(groups) if prefill else (ServerGroup("regular", num_gpus, size),)),)


def policy_model(models: tuple[ServedModel, ...]) -> ServedModel:
    """Return the model that rollouts use by default: the first with the trainer's weights, or the first of all."""
    return next((model for model in models if model.update_weights), models[0])


def model_path(args: ModelSettings, model: ServedModel) -> str:
    """Return the folder that the model's engines serve. For the trained model it is the path in requests."""
    trained = str(args.hf_checkpoint or "MODEL")
    if model.path is None or os.path.realpath(model.path) == os.path.realpath(trained):
        return trained
    return model.path


def file_of(args: EngineSettings) -> str:
    """Return the flag of the file and its path, for errors."""
    return f"{dialect_of(args).file_flag} {args.vllm_config}"


def entries(args: EngineSettings) -> list[tuple[str, dict[str, Any]]]:
    """Return the models in the file, each with its location for errors; [] without a file."""
    key = dialect_of(args).package
    models = args.vllm_topology[key] if args.vllm_topology is not None else ()
    return [(f"{file_of(args)}, {key}[{i}]", model) for i, model in enumerate(models)]


def read(path: str, where: str) -> Any:
    """Return the content of the YAML file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where, remedy="name a YAML file") from None
    except ValueError as error:
        remedy = "correct that line; docs/engines_topologies.md shows the form"
        raise ConfigError(f"is not YAML: {error}", where=where, remedy=remedy) from None


def parse(
    raw: Any, where: str, num_gpus_per_engine: int, hf_checkpoint: str | None, dialect: Dialect = VLLM
) -> tuple[tuple[ServedModel, ...], list[ConfigError]]:
    """Return the models of a file with the content `raw`, and all errors in it.

    Args:
        num_gpus_per_engine: the size of engines in groups that do not set it.
        hf_checkpoint: the trained model.
    """
    reader = _Reader(where, num_gpus_per_engine, hf_checkpoint, dialect)
    models = reader.file(raw)
    return tuple(models), reader.errors


class _Reader:
    """Reads a file and collects its errors."""

    def __init__(self, where: str, num_gpus_per_engine: int, hf_checkpoint: str | None, dialect: Dialect):
        self.where, self.size, self.hf_checkpoint, self.dialect = where, num_gpus_per_engine, hf_checkpoint, dialect
        self.errors: list[ConfigError] = []

    def wrong(self, key: str, what: str, remedy: str = "") -> None:
        self.errors.append(ConfigError(what, where=f"{self.where}, {key}" if key else self.where, remedy=remedy))

    def file(self, raw: Any) -> list[ServedModel]:
        top = self.dialect.package
        entries = self.mapping(raw, (top,), "").get(top)
        if not isinstance(entries, list) or not entries:
            if not self.errors:
                self.wrong(top, "is no list of models", "see docs/engines_topologies.md")
            return []
        models = [self.model(entry, f"{top}[{i}]") for i, entry in enumerate(entries)]
        names = [model.name for model in models]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.wrong(top, f"two models are named '{name}'", "give each a different name")
        return models

    def mapping(self, raw: Any, known: tuple[str, ...], key: str) -> dict[str, Any]:
        if not isinstance(raw, dict):
            self.wrong(key, f"is no mapping, but {_shown(raw)}", f"its keys: {', '.join(known)}")
            return {}
        for name in raw:
            if name not in known:
                like = nearest_name(str(name), list(known))
                remedy = f"did you mean {like}?" if like else f"the keys here are {', '.join(known)}"
                self.wrong(f"{key}.{name}".lstrip("."), "unknown key", remedy)
        return {name: value for name, value in raw.items() if name in known}

    def model(self, raw: Any, key: str) -> ServedModel:
        entry = self.mapping(raw, _MODEL_KEYS, key)
        name, path, updates = entry.get("name"), entry.get("model_path"), entry.get("update_weights", True)
        if not isinstance(name, str) or not name:
            self.wrong(f"{key}.name", "is no name" if "name" in entry else "is missing", "such as actor or ref")
            name = key
        if path is not None and not isinstance(path, str):
            self.wrong(f"{key}.model_path", "is no path")
            path = None
        if not isinstance(updates, bool):
            self.wrong(f"{key}.update_weights", "is neither true nor false")
            updates = True
        trained = self.hf_checkpoint
        if updates and path and trained and os.path.realpath(path) != os.path.realpath(trained):
            self.wrong(
                f"{key}.update_weights",
                f"the trainer's weights would replace those of {path}",
                "update_weights: false keeps it unchanged; to serve the trained model remove model_path",
            )
        raw_groups = entry.get("server_groups")
        if not isinstance(raw_groups, list) or not raw_groups:
            self.wrong(f"{key}.server_groups", "is no list of groups", "each with worker_type and num_gpus")
            raw_groups = []
        before = len(self.errors)
        groups = tuple(self.group(g, f"{key}.server_groups[{i}]") for i, g in enumerate(raw_groups))
        if raw_groups and before == len(self.errors):
            self.roles(groups, f"{key}.server_groups")
        return ServedModel(name, groups, path, updates, f"{self.where}, {key}")

    def roles(self, groups: tuple[ServerGroup, ...], key: str) -> None:
        roles = {group.role for group in groups} - {"placeholder"}
        if not roles:
            self.wrong(key, "only placeholders: no engine would serve the model", "add a group that serves it")
        elif "regular" in roles and len(roles) > 1:
            self.wrong(key, "regular engines beside prefill or decode ones", "make two models of them")
        elif len(roles) == 1 and "regular" not in roles:
            missing = "decode" if "prefill" in roles else "prefill"
            self.wrong(key, f"there is no {missing} group", "prefill and decode engines need each other")

    def group(self, raw: Any, key: str) -> ServerGroup:
        entry = self.mapping(raw, _GROUP_KEYS, key)
        role = entry.get("worker_type", "regular")
        if role not in ROLES:
            like = nearest_name(str(role), list(ROLES))
            remedy = f"did you mean {like}?" if like else ""
            self.wrong(f"{key}.worker_type", f"'{role}' is not one of {', '.join(ROLES)}", remedy)
            role = "regular"
        num_gpus = self.count(entry, "num_gpus", None, key)
        size = self.count(entry, "num_gpus_per_engine", self.size, key)
        if role != "placeholder" and num_gpus % size:
            self.wrong(
                f"{key}.num_gpus",
                f"{num_gpus} GPUs are no multiple of the {size} of an engine",
                "set num_gpus_per_engine for this group",
            )
        overrides = self.overrides(entry.get("overrides") or {}, f"{key}.overrides")
        if role == "placeholder" and ("num_gpus_per_engine" in entry or overrides):
            self.wrong(key, "a placeholder has no engines to configure", "give only num_gpus")
        return ServerGroup(role, num_gpus, size, overrides)

    def count(self, entry: dict[str, Any], name: str, default: int | None, key: str) -> int:
        value = entry.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_GPUS:
            return value
        wanted = f"is no whole number from 1 to {MAX_GPUS}"
        self.wrong(f"{key}.{name}", "is missing" if value is None else f"{_shown(value)} {wanted}")
        return self.size

    def overrides(self, raw: Any, key: str) -> dict[str, list[str]]:
        if not isinstance(raw, dict):
            what = f"is no mapping of {TITLES[self.dialect.package]}'s fields"
            self.wrong(key, what, f"such as {{{self.dialect.length}: 4096}}")
            return {}
        table, out = flag_table(self.dialect.package), {}
        for name, value in ((str(name), value) for name, value in raw.items()):
            problem, remedy = _override_problem(name, table)
            if problem:
                self.wrong(f"{key}.{name}", problem, remedy)
                continue
            flag = table.by_field[name]
            try:
                out[name] = flag.words_of(value)
            except ValueError as error:
                self.wrong(f"{key}.{name}", f"{_shown(value)} {error}", f"it takes {flag.label or 'true or false'}")
        return out


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _override_problem(name: str, table: FlagTable) -> tuple[str, str]:
    """Return what is wrong with a field's name, and the remedy; both "" if it is right."""
    for field_name, why, instead in reserved(table.package):
        if name == field_name:
            return why, f"use {instead}" if instead else "remove it"
    if name in table.by_field:
        return "", ""
    like = nearest_name(name.replace("-", "_"), table.by_field)
    return f"unknown field of {table.describe}", f"did you mean {like}?" if like else ""


def group_words(args: Settings, group: ServerGroup) -> dict[str, list[str]]:
    """Return the words of this group's engines, by field: those of the command line, then `overrides`.

    Prefill and decode engines of vLLM pass the KV cache by NIXL unless `kv_transfer_config` sets another connector.
    """
    words = merge(engine_words(args), group.overrides)
    if args.sglang_enable_ep_moe and "ep_size" not in words:
        parallel = dialect_of(args).parallel(words, group.num_gpus_per_engine, "--sglang-enable-ep-moe")
        words["ep_size"] = ["--ep-size", str(parallel.tensor)]
    return words | (dialect_of(args).role_words(group.role, words) if group.role in ("prefill", "decode") else {})


def max_model_lens(args: Settings) -> list[int | None]:
    """Return the most tokens of a sequence by flags and overrides, for each engine group with the trainer's weights.

    None means the model's own length. A run without such engines has the value of `--vllm-max-model-len`.
    """
    dialect = dialect_of(args)
    groups = [group for model in served_models(args) if model.update_weights for group in model.groups]
    texts = [group_words(args, group).get(dialect.length, [""])[-1] for group in groups if group.num_engines]
    return [num_tokens(text, dialect.units) for text in texts] or [args.vllm_max_model_len]


def num_tokens(text: str, units: Mapping[str, int] = VLLM.units) -> int | None:
    """Return the number that an engine reads in `text`: 4096, or one with one of `units`; None for "auto", -1 or ""."""
    found = _NUM_TOKENS.fullmatch(text)
    return int(float(found[1]) * (units[found[2]] if found[2] else 1)) if found else None
