"""`--vllm-*` and `--router-*`: every flag of the packages, checked here, handed on unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.arguments.all_flags import SGLANG, find, own_flags
from instep.arguments.engine_flags import as_flag
from instep.arguments.help import format_engine_help, format_help
from instep.arguments.parse import parse
from instep.cli import main
from instep.engines import flags
from instep.engines.flags import PREFIXES, TABLES, engine_words, flag_table, merge, read_table, router_arguments
from instep.engines.reserved_flags import reserved
from instep.errors import ConfigError
from scripts.docs.engines_flags import engine_flags_markdown
from tests.command_line import vllm_words

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """The tables of the newest versions, whatever is installed here."""
    monkeypatch.setattr(flags, "installed_version", lambda package: "")
    flag_table.cache_clear()
    yield
    flag_table.cache_clear()


def arguments(*words: str):
    return parse(words, "plan")


def vllm_arguments(args) -> list[str]:
    return [word for words in engine_words(args).values() for word in words]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(*words)
    return str(caught.value)


def test_tables_hold_the_packages_flags():
    counts = {(p, v): len(read_table(p, v).flags) for p, versions in TABLES.items() for v in versions}
    of_vllm = {("vllm", "0.32.0"): 316, ("vllm", "0.26.0"): 274, ("vllm-router", "0.1.17"): 71}
    assert counts == of_vllm | {("sglang", "0.5.17"): 474, ("sglang-router", "0.3.2"): 98}
    new, old = read_table("vllm", "0.32.0").by_name, read_table("vllm", "0.26.0").by_name
    assert "--enable-scale-out" in new and "--enable-scale-out" not in old
    assert new["--gpu-memory-utilization"].kind == "float"
    assert new["--gpu-memory-utilization"].names == ("--gpu-memory-utilization", "--device-memory-utilization")
    assert new["--max-num-batched-tokens"].kind == "size" and new["--max-model-len"].auto
    assert new["--compilation-config"].kind == "json" and new["--hf-overrides"].kind == "json_or_text"
    assert new["--no-enable-prefix-caching"] is new["--enable-prefix-caching"]
    assert new["--data-parallel-size"].default == "1"


def test_every_flag_acts_or_says_what_to_use_instead():
    for package, versions in TABLES.items():
        fields = {flag.field for version in versions for flag in read_table(package, version).flags}
        reasons = {field: (why, instead) for field, why, instead in reserved(package)}
        assert set(reasons) <= fields, set(reasons) - fields
        sglang = package.startswith("sglang")
        for flag in flag_table(package).flags:
            for name in (*flag.names, *flag.negations):
                record = find(PREFIXES[package] + name.removeprefix("--"), sglang=sglang)
                assert record is not None, name
                if flag.field in reasons and record.name not in own_flags(sglang=sglang):
                    assert (record.status, record.note, record.instead) == ("refused", *reasons[flag.field])
        for _, instead in reasons.values():
            named = [word.strip(",") for word in instead.split() if word.startswith("--")]
            assert all(find(word, sglang=sglang) for word in named), instead


def test_values_reach_the_command_lines_unchanged():
    args = arguments(
        *("--vllm-gpu-memory-utilization", "0.70", "--vllm-max-model-len", "4096", "--vllm-dtype", "float32"),
        *("--vllm-enable-expert-parallel", "--vllm-no-enable-prefix-caching", "--vllm-disable-log-stats"),
        *("--vllm-max-num-batched-tokens", "2k", "--vllm-cudagraph-capture-sizes", "1", "2", "4"),
        *("--vllm-compilation-config", '{"mode": 3}', "--vllm-attention-config.backend", "FLASH_ATTN"),
        *("--vllm-hf-overrides={}", "--vllm-middleware", "a.b", "--vllm-middleware", "c.d"),
        *("--router-policy", "round_robin", "--router-request-timeout-secs", "900", "--router-disable-retries"),
        *("--router-balance-abs-threshold", "0", "--router-request-id-headers", "x-a", "x-b"),
    )
    assert vllm_words(args) == [
        *("--max-model-len", "4096", "--dtype", "float32", "--gpu-memory-utilization", "0.70"),
        *("--enable-expert-parallel", "--no-enable-prefix-caching", "--disable-log-stats"),
        *("--max-num-batched-tokens", "2k", "--cudagraph-capture-sizes", "1", "2", "4"),
        *("--compilation-config", '{"mode": 3}', "--attention-config.backend", "FLASH_ATTN"),
        *("--hf-overrides", "{}", "--middleware", "a.b", "--middleware", "c.d"),
    ]
    assert router_arguments(args) == [
        *("--policy", "round_robin", "--request-timeout-secs", "900", "--disable-retries"),
        *("--balance-abs-threshold", "0", "--request-id-headers", "x-a", "x-b"),
    ]
    assert args.rollout_backend == "vllm"  # what auto means with such flags
    assert json.loads(json.dumps(args.to_dict()))["vllm_overrides"]["max_num_batched_tokens"][1] == "2k"
    assert arguments().rollout_backend == "auto" and vllm_words(arguments()) == []


def test_a_length_may_be_written_as_vllm_takes_it():
    for written, length in (("4096", 4096), ("32k", 32000), ("1.5k", 1500), ("32K", 32768)):
        assert arguments("--vllm-max-model-len", written).vllm_max_model_len == length


def test_the_last_of_two_spellings_counts():
    args = arguments("--vllm-enforce-eager", "--vllm-no-enforce-eager")
    assert vllm_words(args) == ["--no-enforce-eager"]
    args = arguments("--vllm-no-enforce-eager", "--vllm-enforce-eager")
    assert vllm_words(args) == ["--enforce-eager"]


WRONG = [
    ("--vllm-gpu-memory-utilisation 0.5", "unknown flag of vLLM 0.32.0", "did you mean --vllm-gpu-memory-utilization?"),
    ("--vllm-confg x", "unknown flag of vLLM 0.32.0", "did you mean --vllm-config?"),
    ("--vllm-something 3", "unknown flag of vLLM 0.32.0", "`instep train --help vllm`"),
    ("--router-polcy x", "unknown flag of vllm-router 0.1.17", "did you mean --router-policy?"),
    ("--vllm-gpu-memory-utilization much", "'much' is not a number", ""),
    ("--vllm-data-parallel-size 1.5", "'1.5' is not a whole number", ""),
    ("--vllm-kv-cache-memory-bytes 4X", "'4X' must be a whole number below 1e18, or one like 2k", ""),
    ("--vllm-compilation-config {x", "'{x' is not JSON", ""),
    ("--vllm-hf-overrides {x}", "'{x}' is not JSON", ""),
    ("--router-policy fair", "'fair' is not one of random, round_robin", ""),
    ("--vllm-enable-lora perhaps", "takes only true or false as value, but got 'perhaps'", ""),
    ("--vllm-enable-lora.x 1", "unknown flag", ""),
    ("--vllm-block-size", "needs a value (INT)", ""),
    ("--vllm-tensor-parallel-size 2", "refused: follows from an engine's GPUs", "use --rollout-num-gpus-per-engine"),
    ("--vllm-host 0.0.0.0", "refused: engines and routers listen where instep reaches them", "leave it out"),
    ("--vllm-model x", "refused", "use --hf-checkpoint"),
    ("--vllm-nnodes 2", "refused", "use --rollout-num-gpus-per-engine"),
    ("--vllm-hf-token secret", "refused", "use the environment variable HF_TOKEN"),
    ("--router-port 3000", "refused", "--vllm-router-ip"),
    ("--router-prefill x", "refused", "use --prefill-num-servers or --vllm-config"),
    ("--vllm-block-size 16 --rollout-backend embedded", "the embedded engine does not have this", "backend vllm"),
]


@pytest.mark.parametrize("words,what,remedy", WRONG, ids=lambda text: text.split()[0] if text.startswith("--") else "")
def test_what_is_wrong_is_told(words, what, remedy):
    text = refusal(*words.split())
    assert what in text and remedy in text and words.split()[0] in text


def test_json_may_hold_vllms_sizes():
    args = arguments("--vllm-kv-transfer-config", '{"kv_connector": "A 8k", "kv_role": "kv_both", "bytes": 80m}')
    assert vllm_words(args)[1].endswith('"bytes": 80m}')


def test_later_words_replace_earlier_ones():
    base = {"compilation_config.mode": ["--compilation-config.mode", "3"], "block_size": ["--block-size", "16"]}
    merged = merge(base, {"compilation_config": ["--compilation-config", "{}"]}, {"block_size": ["--block-size", "32"]})
    assert merged == {
        "compilation_config": ["--compilation-config", "{}"],
        "block_size": ["--block-size", "32"],
    }
    assert base["block_size"] == ["--block-size", "16"]


def test_sglang_flags_are_read_as_their_equivalents_or_refused_with_them():
    instead = {flag.name: flag.read_as or flag.instead for flag in SGLANG.flags}
    for line in """
        --sglang-context-length --vllm-max-model-len
        --sglang-mem-fraction-static --vllm-gpu-memory-utilization
        --sglang-tp-size --rollout-num-gpus-per-engine
        --sglang-dp-size --vllm-data-parallel-size
        --sglang-enable-dp-attention --vllm-data-parallel-size
        --sglang-enable-ep-moe --vllm-enable-expert-parallel
        --sglang-enable-deepep-moe --vllm-all2all-backend
        --sglang-router-ip --vllm-router-ip
        --sglang-router-port --vllm-router-port
        --sglang-router-request-timeout-secs --router-request-timeout-secs
        --sglang-server-concurrency --vllm-max-num-seqs
        --sglang-config --vllm-config
        --sglang-enable-deterministic-inference --deterministic-mode
    """.strip().splitlines():
        name, equivalent = line.split()
        assert instead[name] == equivalent
    for flag in SGLANG.flags:
        known = find(flag.read_as or flag.instead) if flag.read_as or flag.instead else None
        assert known is None or known.status in ("acts", "later"), flag.name
        assert flag.status == ("refused" if flag.instead or "tuned" not in flag.note and not known else "accepted")
    named = ("--rollout-backend", "vllm")
    assert "use --rollout-num-gpus-per-engine" in refusal("--sglang-tp-size", "2", *named)
    assert "use the --vllm- flag of the same meaning" in refusal("--sglang-anything-else", *named)


def test_docs_and_help_are_made_from_the_tables():
    path = ROOT / "docs/engines_flags.md"
    assert path.read_text() == engine_flags_markdown(), "python scripts/docs/engines_flags.py > docs/engines_flags.md"
    assert "flags of vLLM 0.32.0, which is not installed here, as --vllm-*" in format_help()
    text = format_engine_help("vllm")
    assert text.startswith("Flags of vLLM 0.32.0, which is not installed here.")
    assert "--vllm-enable-prefix-caching / --vllm-no-enable-prefix-caching" in text
    assert "--vllm-tensor-parallel-size" in text and "use --rollout-num-gpus-per-engine" in text


def test_help_of_a_package(capsys):
    assert main(["train", "--help", "router"]) == 0
    assert capsys.readouterr().out.startswith("Flags of vllm-router 0.1.17")


def test_another_version_is_asked_once_and_cached(tmp_path, monkeypatch):
    """A package of the same shape as vllm-router, of a version that no table is of."""
    site = tmp_path / "site"
    (site / "vllm_router").mkdir(parents=True)
    (site / "vllm_router/__init__.py").write_text("")
    (site / "vllm_router/router_args.py").write_text(
        "class RouterArgs:\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser):\n"
        "        print('noise')\n"
        "        parser.add_argument('--new-flag', type=int, default=3)\n"
        "        parser.add_argument('--policy', choices=['a', 'b'])\n"
    )
    info = site / "vllm_router-9.9.9+local.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-router\nVersion: 9.9.9+local\n")
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = (
        "from instep.arguments.parse import parse; from instep.engines.flags import router_arguments\n"
        "print(router_arguments(parse(['--router-new-flag', '4', '--router-policy', 'b'], 'plan')))"
    )
    for first in (True, False):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "['--new-flag', '4', '--policy', 'b']", done.stderr
        assert ("reading the flags of vllm-router 9.9.9, once" in done.stderr) == first
    assert (tmp_path / "cache/instep/flags/vllm-router-9.9.9.json").is_file()
    (site / "vllm_router/router_args.py").write_text("raise RuntimeError('broken package')")
    (tmp_path / "cache/instep/flags/vllm-router-9.9.9.json").unlink()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode and "did not list its flags" in done.stderr and "broken package" in done.stderr


def test_help_is_fast_and_imports_no_vllm():
    code = (
        "import sys, time; start = time.process_time()\n"
        "from instep.cli import main; main(['train', '--help']); main(['train', '--help', 'vllm'])\n"
        "assert not {'vllm', 'vllm_router', 'torch'} & set(sys.modules)\n"
        "print(time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2  # 0.12 s on an idle machine


def test_records_of_all_kinds_of_flags():
    table = flag_table("vllm")
    boolean, switch = table.by_name["--enforce-eager"], table.by_name["--disable-log-stats"]
    assert as_flag("vllm", "--vllm-no-enforce-eager", boolean, "").constant is False
    assert switch.words_of(True) == ["--disable-log-stats"] and switch.words_of(False) == []
    assert boolean.words_of(False) == ["--no-enforce-eager"]
    assert table.by_name["--max-model-len"].words_of(4096) == ["--max-model-len", "4096"]
    assert table.by_name["--cudagraph-capture-sizes"].words_of([1, 2]) == ["--cudagraph-capture-sizes", "1", "2"]
    assert table.by_name["--compilation-config"].words_of({"mode": 3}) == ["--compilation-config", '{"mode": 3}']
    with pytest.raises(ValueError, match="neither true nor false"):
        boolean.words_of("yes")
    with pytest.raises(ValueError, match="not a whole number"):
        table.by_name["--block-size"].words_of([1])
