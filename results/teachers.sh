#!/usr/bin/env bash
# 6. Teachers that are no member of the student's class; linear attention, one layer
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
pos=rope,direct_sum,jordan_stabilized,jordan_exact
for teacher in "--omega=.2371" --kernel=phase_drift --kernel=seasonal --kernel=rhythm --kernel=motif --kernel=random; do
    python ablate.py config/synth_jordan.py $teacher --jobs=2 --seeds=0,1,2,3,4 --eval_rows=4096 --pos=$pos \
        --out_dir=out-teachers/${teacher#*=} --results=results/teachers.csv
done
python ablate.py --report=results/teachers.csv --plot=False
