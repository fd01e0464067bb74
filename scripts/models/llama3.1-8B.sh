# Llama-3.1-8B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --vocab-size 128256 --untie-embeddings-and-output-weights
)
