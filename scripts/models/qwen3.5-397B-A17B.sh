# Qwen3.5-397B-A17B, its language model; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 60 --hidden-size 4096 --ffn-hidden-size 1024 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 256
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --disable-bias-linear --qk-layernorm
    --attention-output-gate --use-rotary-position-embeddings --rotary-percent 0.25 --rotary-base 10000000
    --vocab-size 248320 --untie-embeddings-and-output-weights
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 1024
    --moe-shared-expert-intermediate-size 1024 --moe-shared-expert-gate
)
