#!/usr/bin/env bash
# 8. Text: bytes of WikiText; first python data/wikitext103/prepare.py --train_member=valid --subset=True
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/wikitext_cpu.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-text \
    --results=results/text.csv --eval_rows=1024 --baseline=rope+alibi \
    --pos=rope,rope_hi,alibi,rope+alibi,damped:pos_c=1,damped+alibi:pos_c=1,direct_sum,jordan_exact,\
jordan_scaled,jordan_scaled+alibi,jordan_stabilized+alibi,jordan_stabilized_abs,t5,kerple,fire,\
rope+kerple,jordan_scaled+kerple,jordan_scaled:pos_eta0=0:pos_eta_max=.1,\
jordan_scaled+alibi:pos_eta0=0:pos_eta_max=.1
python ablate.py --report=results/text.csv --baseline=rope+alibi --figure=difference \
    --title='Text: damping with ALiBi is ahead of rope+alibi, with a shear or without'
python probe.py --placebo=True --ckpt=$(ls out-text/*/ckpt.pt | paste -sd,) > results/text_eta.txt
