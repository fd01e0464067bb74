"""The server that TRL's own clients use: `instep vllm-serve` (docs/neighbours/trl.md)."""
