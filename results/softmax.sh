#!/usr/bin/env bash
# 3. The paper's softmax, two and three layers, ten seeds
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4,5,6,7,8,9 --out_dir=out-softmax \
    --results=results/softmax.csv --n_layer=2 --attn_temperature=1 \
    --pos=rope,rope_hi,damped,direct_sum,jordan_stabilized,jordan_stabilized_abs,\
jordan_exact:pos_gamma0=0,jordan_scaled:pos_c=.1
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4,5,6,7,8,9 --out_dir=out-softmax-3 \
    --results=results/softmax.csv --n_layer=3 --attn_temperature=1 \
    --pos=rope,rope_hi,direct_sum,jordan_stabilized
python ablate.py --report=results/softmax.csv --pos='rope,direct_sum,jordan_stabilized,jordan_scaled c=0.1,jordan_exact gamma0=0' \
    --title='Two layers, softmax: no encoding is told apart from rope at 8 times the training length'
