"""Builds flash-attn 2.8.3, which verl wants and of which there are no wheels on the index: what verl uses of it for a
Qwen3 on Hopper, causal attention in bfloat16 with heads of 128, and all its Python.

    python3.12 build_flash_attn.py FOLDER     puts there a wheel for torch 2.11.0 with CUDA 13 (ten minutes of one core)

The kernels that are built are those of the whole build: what is left out are branches that other shapes take, which
raise. nvcc comes from the index, too; no GPU is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

VERSION = "2.8.3"
NVCC = ["nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85"]
TOOLS = ["torch==2.11.0", "numpy", "setuptools", "wheel", "packaging", "psutil", "ninja"]
LEFT_OUT = ("DROPOUT", "ALIBI", "SOFTCAP", "LOCAL", "UNEVEN_K")
SWITCHES = r"""
#include <stdexcept>
#undef FP16_SWITCH
#define FP16_SWITCH(COND, ...) [&] { \
    if (COND) throw std::runtime_error("built for bfloat16 only"); \
    using elem_type = cutlass::bfloat16_t; return __VA_ARGS__(); }()
#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...) [&] { \
    if ((HEADDIM) != 128) throw std::runtime_error("built for heads of 128 only"); \
    constexpr static int kHeadDim = 128; return __VA_ARGS__(); }()
#define CAUSAL_SWITCH(COND, CONST_NAME, ...) [&] { \
    if (!(COND)) throw std::runtime_error("built for causal attention only"); \
    constexpr static bool CONST_NAME = true; return __VA_ARGS__(); }()
"""


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *TOOLS], check=True)
        subprocess.run([*pip, "install", "--no-deps", *NVCC], check=True)
        source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", f"flash-attn=={VERSION}"]
        quick = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}  # pip asks setup.py for the name
        subprocess.run([*pip, "download", *source, "--dest", scratch], check=True, env=quick)
        with tarfile.open(folder / f"flash_attn-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        tree = folder / f"flash_attn-{VERSION}"
        trim(tree)
        cuda = next((folder / "venv").glob("lib/python*/site-packages/nvidia/cu13"))
        (cuda / "lib64").mkdir()
        (cuda / "lib64" / "libcudart.so").symlink_to(cuda / "lib" / "libcudart.so.13")
        env = {
            **os.environ,
            "CUDA_HOME": str(cuda),
            "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
            "FLASH_ATTN_CUDA_ARCHS": "90",
            "NVCC_THREADS": "1",
            "NVCC_APPEND_FLAGS": " ".join(f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT),
            "PATH": f"{folder}/venv/bin:{os.environ['PATH']}",
        }
        words = [python, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(out.absolute())]
        subprocess.run(words, cwd=tree, env=env, check=True)


def trim(tree: Path) -> None:
    """Leave the kernels for one shape in flash-attn's sources."""
    switches = tree / "csrc" / "flash_attn" / "src" / "static_switch.h"
    switches.write_text(switches.read_text() + SWITCHES)
    api = tree / "csrc" / "flash_attn" / "flash_api.cpp"
    text = api.read_text().replace("BOOL_SWITCH(params.is_causal,", "CAUSAL_SWITCH(params.is_causal,")
    split = "run_mha_fwd_splitkv_dispatch<elem_type, kHeadDim, Is_causal>(params, stream);\n                }"
    assert split in text
    api.write_text(text.replace(split, 'throw std::runtime_error("built without split KV");\n                }'))
    setup = tree / "setup.py"
    other = r' *"csrc/flash_attn/src/flash_(?!(fwd|bwd)_hdim128_bf16_causal_sm80)\w+\.cu",\n'
    setup.write_text(re.sub(other, "", setup.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
