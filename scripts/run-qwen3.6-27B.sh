#!/usr/bin/env bash
# GRPO of Qwen3.6-27B on one host of 8 GPUs, as of Qwen3.5-27B
MODEL=qwen3.6-27B exec "$(dirname "${BASH_SOURCE[0]}")/run-qwen3.5-27B.sh" "$@"
