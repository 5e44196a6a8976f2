#!/usr/bin/env bash
# 4. Dose and response: one layer, from softmax (1) to linear attention (1000)
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for t in 1 3 10 30 100 1000; do
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-temperature-$t \
    --results=results/temperature.csv --attn_temperature=$t --eval_rows=4096 \
    --pos=rope,damped,direct_sum,jordan_stabilized,jordan_exact
done
python ablate.py --report=results/temperature.csv --figure=attn_temperature
