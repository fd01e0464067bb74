#!/usr/bin/env bash
# GRPO of Qwen3.6-35B-A3B on one host of 8 GPUs, as of Qwen3.5-35B-A3B
MODEL=qwen3.6-35B-A3B exec "$(dirname "${BASH_SOURCE[0]}")/run-qwen3.5-35B-A3B.sh" "$@"
