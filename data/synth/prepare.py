"""
The rows of the synthetic task as files, for other programs. train.py needs none of them: dataset=synth
makes its rows in memory. `python train.py --dataset=synth_rows` reads these.

    python data/synth/prepare.py [--block_size=256] [--kernel=mixed] [--omega=0.1778]

A row is T - 1 random bits, QUERY (2) and the answer bit; tasks.py, KernelTask, has the rule. Writes
train.bin, val.bin, test_<T>.bin (uint8) and meta.json into data/<name>.
"""

import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure
from data.folder import write_folder
from tasks import KernelTask

# -----------------------------------------------------------------------------
block_size = 256 # L: bits and QUERY of a training row, and the unit of the teacher
test_lens: tuple[int, ...] = () # T of the test files; empty: L, 2L, 4L, 8L
kernel = 'mixed' # one of KERNELS in tasks.py
omega = 10000 ** (-2 * 3 / 32) # 0.1778 radians per token: index 3 of the grid of a head of 32
train_rows = 24000
val_rows = 1024
test_rows = 1024 # per length
seed = 0
name = 'synth_rows' # the folder under data/
# -----------------------------------------------------------------------------
config = configure(globals(), {
    '2 <= x <= 10**6': 'block_size',
    '1 <= x <= 10**8': 'train_rows val_rows test_rows',
    '0 <= x <= 10**9': 'seed',
    '0 < x <= 10': 'omega',
    'all(2 <= n <= 10**6 for n in x)': 'test_lens',
    "x and all(c.isalnum() or c in '-_' for c in x)": 'name',
})
task = KernelTask(config | dict(lengths=(), kernel_seed=None))
lengths = tuple(dict.fromkeys((block_size, *(test_lens or (2 * block_size, 4 * block_size, 8 * block_size)))))

def rows(stream, T, n):
    """n rows of T + 1 tokens, some thousand at a time."""
    for a in range(0, n, 4096):
        x, y = task.rows(np.random.default_rng([seed, 4, stream, T, a]), T, min(4096, n - a))
        yield np.concatenate((x, y), axis=1)

splits = {'train': rows(0, block_size, train_rows), 'val': rows(1, block_size, val_rows)}
splits |= {f'test_{T}': rows(2, T, test_rows) for T in lengths}
write_folder(name, splits, dict(
    kind='rows', vocab_size=task.vocab_size, answers=task.answers, asked=1, dtype='uint8',
    lengths=list(lengths), note=f'{task.note} seed={seed}'))
print(f"python train.py --dataset={name} --block_size={block_size}")
