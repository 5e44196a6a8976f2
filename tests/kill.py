"""
The long kill test, beside the suite: a run that saves at every iteration is killed (SIGKILL) at a random instant, 50 times over.
Each time the file on disk must load and the next run must go on from it.

    python tests/kill.py [50]
"""

import os
import random
import subprocess
import sys
import tempfile
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAGS = '--block_size=256 --n_embd=64 --n_head=2 --batch_size=2 --max_iters=1000000 --eval_interval=1 --eval_iters=1 --eval_lens=256'.split()

n, rng, resumed, loaded, reached, during_write = int((sys.argv[1:] or ['50'])[0]), random.Random(0), 0, 0, 0, 0
with tempfile.TemporaryDirectory() as out:
    for kill in range(n):
        p = subprocess.Popen([sys.executable, os.path.join(ROOT, 'train.py'), *FLAGS, f'--out_dir={out}', *(['--init_from=resume'] if kill else [])],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in p.stdout:
            resumed += line.startswith('resuming') and f'at iteration {reached}' in line
            if line.startswith('iter ') and int(line.split()[1].strip(':')) > reached:
                break # it is past the checkpoint it began with; kill it in the next tenths of a second
        time.sleep(rng.uniform(0, 0.3))
        p.kill()
        p.wait()
        during_write += any(f.endswith('.tmp') for f in os.listdir(out))
        for f in os.listdir(out):
            if f.endswith('.tmp'):
                os.remove(os.path.join(out, f))
        try:
            reached = torch.load(os.path.join(out, 'ckpt.pt'), weights_only=True)['iter_num']
            torch.load(os.path.join(out, 'best.pt'), weights_only=True)
            loaded += 1
        except Exception as e:
            print(f'kill {kill}: {type(e).__name__}: {e}')
        print(f'\rkill {kill + 1}: iteration {reached}', end='', flush=True)
print(f'\n{n} kills, {during_write} of them during a write: {loaded} files loaded, {resumed} of {n - 1} runs went on from theirs')
sys.exit(0 if loaded == n and resumed == n - 1 else 1)
