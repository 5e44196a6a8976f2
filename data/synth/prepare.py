"""
The Jordan-friendly task: did a far, phase-coded sum of the bits come out positive?

    python data/synth/prepare.py [--L=256] [--kernel=mixed] [--omega=0.1778]

A row is T-1 random bits, a QUERY token and the answer bit: T+1 tokens of a vocabulary of 3, T = L in training. With
b_{T-1-d} the bit at lag d from QUERY,

    answer = 1  iff  sum_{d=1..T-1} K(d) (2 b_{T-1-d} - 1) > 0       K(d) = (d/L) cos(omega d)  by default

L stays the training length for every test length T. Writes train.bin, val.bin, test_<T>.bin (uint8 rows) and meta.json into
data/<name>. train.py runs this by itself when files are missing or have other sizes.
"""

import os
import sys
import json
import signal
import hashlib

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line while torch loads
from common import KERNELS, data_dir, fail, replace_file

# -----------------------------------------------------------------------------
L = 256 # training length: bits and QUERY of a training row, and the unit of K
test_lens: tuple[int, ...] = () # T of the test files; empty: L, 2L, 4L, 8L
kernel = 'mixed' # K(d): mixed, phase, linear, damped_wave, phase_drift, seasonal, rhythm, motif, decay, jet_2, jet_3, high_jet_1..3
omega = 10000 ** (-2 * 3 / 32) # 0.1778 radians per token: index 3 of the grid of a head of 32
train_rows = 24000 # batch_size x max_iters, so that no row is seen twice
val_rows = 1024
test_rows = 1024 # per length
data_seed = 0 # of the rows; has nothing to do with train.py's seed
name = 'synth' # the folder under data/
# -----------------------------------------------------------------------------
configure(globals(), {'2 <= x <= 10**6': 'L', '1 <= x <= 10**8': 'train_rows val_rows test_rows', '0 <= x <= 10**9': 'data_seed', '0 < x <= 10': 'omega',
                      "x and all(c.isalnum() or c in '-_' for c in x)": 'name'})
if kernel not in KERNELS:
    usage(f"kernel={kernel!r}: expected one of {', '.join(KERNELS)}")
test_lens = test_lens or (L, 2 * L, 4 * L, 8 * L)
if min(test_lens) < 2:
    usage(f"test_lens={','.join(map(str, test_lens))}: expected lengths >= 2")
folder = data_dir(name)

def write_rows(split, stream, T, n):
    """n rows of T+1 tokens from their own random stream. Returns their checksum and the share of answers that are 1."""
    rng = np.random.default_rng([data_seed, *stream])
    K = KERNELS[kernel](np.arange(T - 1, 0, -1), L, omega)                 # by position: lag T-1 first
    sha, ones = hashlib.sha256(), 0
    def write(f):
        nonlocal ones
        for a in range(0, n, 4096):
            bits = rng.integers(0, 2, (min(4096, n - a), T - 1), dtype=np.uint8)
            answer = ((2.0 * bits - 1) @ K > 0).astype(np.uint8)
            rows = np.concatenate((bits, np.full_like(bits[:, :1], 2), answer[:, None]), axis=1)
            f.write(rows.tobytes())
            sha.update(rows.tobytes())
            ones += int(answer.sum())
    replace_file(os.path.join(folder, f'{split}.bin'), write)
    print(f"{split + '.bin':14} {n:7,} rows of {T} + 1 tokens, {ones / n:.1%} answers are 1")
    return sha.hexdigest()[:16]

# meta.json goes first and comes back last: an interrupted run leaves a data set that is visibly unfinished
signal.signal(signal.SIGINT, lambda *_: (print('prepare.py: interrupted; run it again', file=sys.stderr), sys.exit(130)))
meta_path = os.path.join(folder, 'meta.json')
try:
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(meta_path):
        os.remove(meta_path)
    sums = {'train': write_rows('train', (0, L), L, train_rows), 'val': write_rows('val', (1, L), L, val_rows)}
    sums |= {f'test_{T}': write_rows(f'test_{T}', (2, T), T, test_rows) for T in test_lens}
    meta = dict(kind='rows', vocab_size=3, dtype='uint8', row_len=L + 1, L=L, kernel=kernel, omega=omega, test_lens=list(test_lens),
                train_rows=train_rows, val_rows=val_rows, test_rows=test_rows, data_seed=data_seed, checksums=sums)
    replace_file(meta_path, lambda f: f.write(json.dumps(meta, indent=1).encode()))
except OSError as e:
    fail(f"data/{name} cannot be written ({e.strerror}): make room there and run this again")
