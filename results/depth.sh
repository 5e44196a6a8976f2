#!/usr/bin/env bash
# 9. Depth: do two linear layers of rope make distance times phase?
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-depth-1 \
    --results=results/depth.csv --n_layer=1 \
    --pos=rope
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-depth-2 \
    --results=results/depth.csv --n_layer=2 \
    --pos=rope,jordan_exact
python ablate.py --report=results/depth.csv \
    --title='Two layers, linear attention: at 8 times the training length rope and jordan_exact are not told apart'
# the kernel that each computes
python probe.py --rows=1024 --ckpt=$(ls out-depth-1/*/ckpt.pt out-depth-2/*/ckpt.pt | paste -sd,) > out-depth.txt
grep -A20 'All checkpoints' out-depth.txt > results/depth_kernels.txt
