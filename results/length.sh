#!/usr/bin/env bash
# 2b. If the paper's scale shows a lead that L = 128 does not: the same steps and layers at L = 256 and 512
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for L in 256 512; do
python ablate.py config/synth_paper.py --jobs=2 --seeds=0,1,2 --out_dir=out-length-$L \
    --results=results/length.csv --block_size=$L --pos_eta_max=$((L / 10)) --eval_rows=512 \
    --pos=rope,jordan_stabilized_abs
done
