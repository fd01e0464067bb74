"""What nvidia-smi tells of the GPUs of a host."""

import pytest

from instep.system import gpus


@pytest.mark.parametrize(
    "visible, rows, gib",
    [
        (None, "0, GPU-aa1, [N/A], 81920, NVIDIA H100, 80GB\n1, GPU-bb2, Disabled, 40960, NVIDIA A100\n", 40),
        ("0", "0, GPU-aa1, [N/A], 81920, NVIDIA H100, 80GB\n1, GPU-bb2, Disabled, 40960, NVIDIA A100\n", 80),
        ("GPU-bb", "0, GPU-aa1, [N/A], 81920, NVIDIA H100, 80GB\n1, GPU-bb2, Disabled, 40960, NVIDIA A100\n", 40),
        ("0", "0, GPU-aa1, Disabled, [N/A], NVIDIA GB10\n", None),
        ("7", "0, GPU-aa1, Disabled, 81920, NVIDIA H100, 80GB\n", None),
        ("", "0, GPU-aa1, Disabled, 81920, NVIDIA H100, 80GB\n", None),
        ("MIG-cc", "0, GPU-aa1, Enabled, 81920, NVIDIA H100, 80GB\n", None),
        (None, "0, GPU-aa1, Enabled, 81920, NVIDIA H100, 80GB\n", None),
        (None, "", None),
    ],
)
def test_memory_is_that_of_the_visible_gpus(monkeypatch, tmp_path, visible, rows, gib):
    (tmp_path / "rows").write_text(rows)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n/bin/cat {tmp_path / 'rows'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus.gpus_here.cache_clear()
    try:
        assert gpus.memory_of_gpus() == gib
    finally:
        gpus.gpus_here.cache_clear()
