"""
What an n-gram knows of the music: bits per token on the very targets that train.py scores models on.

    python data/music/ngram.py           # every n up to 5, in seconds
    python data/music/ngram.py --n=9     # the step before and this one

Interpolated, Witten-Bell. In the training split c(h w) is how often token w followed the n - 1 tokens h,
c(h) how often anything followed h, t(h) how many different tokens did:

    p(w | h) = (c(h w) + t(h) p(w | h without its first token)) / (c(h) + t(h)), down to p = 1 / vocabulary.

Four tokens back is the same voice one sixteenth earlier: a 5-gram sees just that far.
"""

import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line
from tasks import TASKS, interval, make_task

# -----------------------------------------------------------------------------
n = 5
dataset = 'music'
# what is scored, as in config/music.py
block_size = 128
eval_lens: tuple[int, ...] = (128, 256, 512, 768) # the last targets of windows of the longest
eval_rows = 1024
eval_targets = 0 # 0: half of block_size
seed = 0
# -----------------------------------------------------------------------------
if __name__ == '__main__':
    configure(globals(), {'1 <= x <= 9': 'n', '1 <= x <= 10**6': 'block_size eval_rows',
                          '0 <= x <= 10**9': 'eval_targets seed',
                          'x and all(2 <= n <= 10**6 for n in x)': 'eval_lens'})

def keys_of(rows, V):
    """(..., m) tokens -> (...), each m of them as one number."""
    keys = np.zeros(rows.shape[:-1], np.int64)
    for column in range(rows.shape[-1]):
        keys = keys * V + rows[..., column]
    return keys

def find(known, values, keys):
    """The value of each key, 0 where it is not known. `known` is sorted."""
    at = np.searchsorted(known, keys).clip(max=len(known) - 1)
    return np.where(known[at] == keys, values[at], 0)

def probabilities(train, rows, V, n):
    """Tokens to count in, rows (N, n) whose last is asked -> [p (N,) of the 1-gram, ..., of the n-gram]."""
    p, all_p = np.full(len(rows), 1 / V), []
    for m in range(1, n + 1):
        windows = np.lib.stride_tricks.sliding_window_view(train, m)                # (tokens - m + 1, m)
        grams, c_hw = np.unique(keys_of(windows, V), return_counts=True)
        # grams that share h are neighbours
        h, first = np.unique(grams // V, return_index=True)
        c_h, t_h = np.add.reduceat(c_hw, first), np.diff(np.append(first, len(grams)))
        keys = keys_of(rows[:, n - m:], V)
        count = find(grams, c_hw, keys)
        followed, kinds = find(h, c_h, keys // V), find(h, t_h, keys // V)
        p = np.where(followed > 0, (count + kinds * p) / np.maximum(followed + kinds, 1), p)
        all_p.append(p)
    return all_p

def main():
    config = dict(dataset=dataset, block_size=block_size, lengths=(), seed=seed)
    if dataset in TASKS:
        usage(f"dataset={dataset}: expected a folder of data/; its rows are made in memory")
    task = make_task(config)
    measured, why = task.available(eval_lens)
    if measured != eval_lens:
        usage(f"eval_lens={','.join(map(str, eval_lens))}: {why}")
    longest = max(eval_lens)
    if n > longest:
        usage(f"n={n}: expected n <= the longest of eval_lens, {longest}")
    if task.vocab_size ** n >= 2**63:
        usage(f"n={n}: {n} tokens of {task.vocab_size} do not fit into 64 bits")
    k = min(eval_targets or block_size // 2, *eval_lens)
    x, y = task.examples('test', longest, eval_rows, seed, longest, k)
    # each target with the n - 1 tokens before it
    whole = np.concatenate((x.numpy(), y[:, -1:].numpy()), axis=1)
    rows = np.lib.stride_tricks.sliding_window_view(whole, n, axis=1)[:, -k:].reshape(-1, n)
    train = task.tokens('train').astype(np.int64)
    print(f"{len(train):,} tokens to train on; {len(rows):,} targets in {len(x)} windows of {longest} tokens")
    print(f"{'n':>3} {'bits/token':>11}  95% interval")
    for m, p in enumerate(probabilities(train, rows, task.vocab_size, n), 1):
        bits = -np.log2(p).reshape(len(x), k).mean(axis=1)
        lo, hi = interval(bits)
        print(f"{m:3} {bits.mean():11.4f}  {lo:.3f}-{hi:.3f}")

if __name__ == '__main__':
    main()
