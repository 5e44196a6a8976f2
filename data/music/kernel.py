"""
Does a head use distance times the period of a bar? How each head of a trained model scores a lag.

    python data/music/kernel.py --ckpt=out-music/ckpt.pt               # the table
    python data/music/kernel.py --ckpt=out-music/ckpt.pt --plot=True   # and a picture with bar lines

The score of a query and a key is averaged over pairs of test tokens that have nothing to do with each other,
each pair put at every lag: what is left is what the head makes of the lag alone. A bias is left out, since
it would hide the rest. The same with eta = 0 tells what the shear adds, block by block. A bar of 4/4 has 16
steps, 64 tokens; some chorales are in 3/4, and many begin with an upbeat, which no lag knows.
"""

import math
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line

import numpy as np
import torch

from common import COLORS, fail, pyplot, save_figure
from data.music.notes import STEPS, VOICES
from runs import load, model_of
from tasks import make_task

# -----------------------------------------------------------------------------
ckpt = 'out-music/ckpt.pt'
pairs = 256 # queries, each with one key
longest = 4 # lags up to this many training lengths
seed = 0 # which windows and pairs
plot = False # draw the picture, beside the checkpoint (needs matplotlib)
# -----------------------------------------------------------------------------
if __name__ == '__main__':
    configure(globals(), {'2 <= x <= 10**5': 'pairs', '1 <= x <= 64': 'longest', '0 <= x <= 10**9': 'seed',
                          "x != ''": 'ckpt'})

BAR = 4 * STEPS * len(VOICES) # tokens of a bar of 4/4

def queries_and_keys(model, idx):
    """Before rotation, of every layer: [(q, k)], each (tokens of idx, nh, hs)."""
    seen = []
    hooks = [block.attn.c_attn.register_forward_hook(lambda module, x, out: seen.append(out))
             for block in model.transformer.h]
    model(idx, targets=idx) # with targets, so that no position is left out
    for hook in hooks:
        hook.remove()
    n = model.config.n_head
    return [out.flatten(0, 1).unflatten(-1, (3 * n, -1)).split(n, dim=1)[:2] for out in seen]

def kernels(pos, q, k, lags):
    """Mean score by lag, of queries and keys paired as they stand: (N, nh, hs) each, (n) -> (nh, n)."""
    i, j = lags[-1:], lags[-1] - lags
    u = pos.rotate(q[:, :, None], i)
    w = pos.rotate(k[:, :, None].expand(-1, -1, len(lags), -1), j) # the same key at every lag
    score = pos.score(u, w, i, j) * pos.hs ** -.5
    return score[:, :, 0].mean(dim=0)

def without_shear(pos, q, k, lags):
    """The kernels with eta = 0 in block f alone, for each f: (F, nh, n)."""
    learned, out = pos.atanh_eta.clone(), []
    by_block = pos.atanh_eta.view(pos.n_head, -1)
    for f in range(by_block.size(1)):
        by_block[:, f] = 0
        out.append(kernels(pos, q, k, lags))
        pos.atanh_eta.copy_(learned)
    return torch.stack(out)

@torch.no_grad()
def heads_of(model, task):
    """A dict for each head: its kernel, and the part of its shear by block."""
    L, rng = model.config.block_size, np.random.default_rng([seed, 5])
    windows, _ = task.examples('test', L, 64, seed, L, L)
    lags = torch.arange(longest * L + 1)
    out = []
    for l, (pos, (q, k)) in enumerate(zip(model.pos_modules(), queries_and_keys(model, windows.long()))):
        q, k = (x[torch.from_numpy(rng.integers(0, len(x), pairs))] for x in (q, k))
        kernel = kernels(pos, q, k, lags)
        shear = kernel - without_shear(pos, q, k, lags)
        periods = 2 * math.pi / pos.omega(torch.float64, 'cpu')[::pos.m]
        for h in range(model.config.n_head):
            out.append(dict(name=f'{l}.{h}', kernel=kernel[h], shear=shear[:, h], periods=periods))
    return lags, out

def draw(lags, heads, L, title, path):
    plt = pyplot()
    layers = len({head['name'].split('.')[0] for head in heads})
    fig, axes = plt.subplots(layers, len(heads) // layers, figsize=(11, 1.9 * layers + .6), sharex=True,
                             layout='constrained', squeeze=False)
    for ax, head in zip(axes.flat, heads):
        for bar in range(BAR, len(lags), BAR):
            line = ax.axvline(bar, color='0.85', lw=.8)
        learned, = ax.plot(lags, head['kernel'], color=COLORS['jordan_scaled'], lw=1)
        without, = ax.plot(lags, head['kernel'] - head['shear'].sum(dim=0), color='0.4', lw=.7, ls='--')
        trained = ax.axvline(L, color='#888888', lw=1, ls=':')
        layer, _, n = head['name'].partition('.')
        ax.set_title(f'layer {layer}, head {n}', fontsize=9, loc='left')
        ax.spines[['top', 'right']].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel('lag (tokens)')
    for ax in axes[:, 0]:
        ax.set_ylabel('mean score')
    shown = {'as learned': learned, 'shear set to 0': without, 'a bar of 4/4': line}
    shown['training length'] = trained
    fig.legend(shown.values(), shown.keys(), title=title, loc='outside upper left', ncols=4, frameon=False,
               alignment='left')
    save_figure(fig, path)
    print(f'figure: {path}')

def main():
    checkpoint = load(ckpt)
    model = model_of(checkpoint, ckpt).eval().requires_grad_(False)
    task = make_task(checkpoint['config'])
    if not all(getattr(pos, 'atanh_eta', None) is not None for pos in model.pos_modules()):
        usage(f"ckpt={ckpt}: pos={model.config.pos} has no shear to look at")
    if task.metric != 'bpt':
        fail(f"{ckpt}: was trained on {checkpoint['config']['dataset']}, not on music")
    lags, heads = heads_of(model, task)
    L = model.config.block_size
    print(f"{ckpt}: mean score by lag, from 0 to {longest}L, of {pairs} pairs\n"
          "spread: its standard deviation over the lags; shear: that of what eta adds; period: in tokens,\n"
          f"of the block that adds most (a bar of 4/4 has {BAR}); share: its part of the squares\n")
    print(f"{'layer.head':>10} {'spread':>8} {'shear':>8} {'period':>8} {'share':>6}")
    for head in heads:
        energy = head['shear'].var(dim=1)
        top = int(energy.argmax())
        print(f"{head['name']:>10} {head['kernel'].std():8.3f} {head['shear'].sum(dim=0).std():8.3f} "
              f"{head['periods'][top]:8.1f} {energy[top] / energy.sum():6.0%}")
    if plot:
        title = 'Music: the mean score that each head gives to a lag'
        draw(lags, heads, L, title, os.path.join(os.path.dirname(ckpt), 'kernel.png'))

if __name__ == '__main__':
    main()
