# Qwen3.6-35B-A3B, whose language model has the shape of Qwen3.5-35B-A3B
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
