#!/usr/bin/env bash
# 2. The scale of the paper: L = 1024, three layers with softmax, 1,200 steps; about 25 minutes a run with two threads
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMP_NUM_THREADS=2
python ablate.py config/synth_paper.py --jobs=1 --seeds=0,1,2 --out_dir=out-paper \
    --results=results/paper.csv --eval_rows=512 \
    --pos=rope,jordan_stabilized_abs,rope_hi,damped,direct_sum:pos_eta_max=.1,jordan_stabilized
python ablate.py config/synth_paper.py --jobs=1 --seeds=0 --out_dir=out-paper \
    --results=results/paper.csv --eval_rows=512 \
    --pos=jordan_scaled:pos_eta_max=.1,jordan_scaled:pos_c=.1:pos_eta_max=.1
