#!/usr/bin/env bash
# 1. One layer, attention linear in its scores: which encoding reaches the teacher (d/L) cos(omega d)?
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-linear \
    --results=results/linear.csv --eval_rows=4096 \
    --pos=rope,jordan_exact,direct_sum,damped,rope_hi,jordan_stabilized,jordan_stabilized_abs,\
jordan_scaled,damped:pos_c=1,jordan_exact:pos_gamma0=0,nope,alibi,rope+alibi,\
damped:pos_c=1:pos_lr_mult=0,jordan_scaled:pos_lr_mult=0,jordan_scaled:pos_c=.1
# the figure: of some, and what it says
python ablate.py --report=results/linear.csv --pos='rope,direct_sum,damped c=1,jordan_stabilized,jordan_exact' \
    --title='One layer, linear attention: jordan_exact holds to 8 times the training length'
