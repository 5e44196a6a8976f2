"""
The long kill test, beside the suite: a run that saves at every iteration is killed (SIGKILL) at a random
instant, 50 times over. Each time the files on the disk must load and the next run must go on from them.

    python tests/kill.py [50]
"""

import os
import random
import sys
import tempfile
import time

from conftest import start

import runs

FLAGS = '''--block_size=256 --n_embd=64 --n_head=2 --batch_size=2 --max_iters=1000000 --eval_interval=1
           --eval_iters=1 --eval_lens=256'''.split()

n = int(sys.argv[1]) if len(sys.argv) > 1 else 50
rng, resumed, reached, during_write = random.Random(0), 0, 0, 0
with tempfile.TemporaryDirectory() as folder:
    out = os.path.join(folder, 'out')
    for kill in range(n):
        p = start('train.py', *FLAGS, *(['--init_from=resume'] if kill else []), cwd=folder)
        # wait until it is past the checkpoint that it began with
        for line in p.stdout:
            resumed += line.startswith('resuming') and f'at iteration {reached}' in line
            if line.startswith('iter ') and int(line.split()[1].strip(':')) > reached:
                break
        # and kill it in the next tenths of a second
        time.sleep(rng.uniform(0, 0.3))
        p.kill()
        p.communicate()
        during_write += any(file.endswith('.tmp') for file in os.listdir(out))
        # this ends the test in one line, should a file not load
        runs.load(os.path.join(out, 'best.pt'))
        reached = runs.load(os.path.join(out, 'ckpt.pt'))['iter_num']
        print(f'\rkill {kill + 1}: iteration {reached}', end='', flush=True)
print(f'\n{n} kills, {during_write} of them during a write: every file loaded, '
      f'{resumed} of {n - 1} runs went on from theirs')
sys.exit(0 if resumed == n - 1 else 1)
