# Moonlight-16B-A3B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --swiglu --num-attention-heads 16
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --use-rotary-position-embeddings --rotary-base 50000
    --vocab-size 163840 --untie-embeddings-and-output-weights
    --num-experts 64 --moe-layer-freq "[0]*1+[1]*26" --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 --moe-router-topk 6 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.446
)
