#!/usr/bin/env bash
# 7. Training on several lengths, one drawn for each step: is extrapolation all that softmax breaks?
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4,5 --out_dir=out-lengths \
    --results=results/lengths.csv --n_layer=2 --attn_temperature=1 --lengths=32,48,64,96,128 \
    --pos=rope,rope_hi,direct_sum,jordan_stabilized,jordan_exact:pos_gamma0=0
python ablate.py --report=results/lengths.csv \
    --title='Two layers, softmax: training on several lengths does not save the undamped exact shear'
