"""
What the tests share. `pytest` works from any directory: the repository is put on the path here.
"""

import copy
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch

torch.set_num_threads(1) # the workers of pytest-xdist share the cores
# a job in the background ignores Ctrl-C, and what it starts does too: there would be none to test
signal.signal(signal.SIGINT, signal.default_int_handler)

import runs
from model import POS, GPTConfig, make_pos

ALL = [name + bias for name in POS for bias in ('', '+alibi') if not (bias and name in ('learned', 'alibi'))]

# the paper's table of encodings (arXiv 2605.04217), written down here independently of model.py.
# a registry entry that is missing from it is tested by every law that needs no such knowledge
SHEAR = {'real_jordan': 'd/L', 'direct_sum': 'd/L', 'jordan_exact': 'd', 'jordan_scaled': 'd/L',
         'jordan_stabilized': 'tau(d)', 'jordan_stabilized_abs': 'tau(i)-tau(j)'}
DAMPED = ['damped', *SHEAR]
JORDAN = ['rope', 'rope_hi', *DAMPED]                  # has an operator G(d) on a head vector
NOT_RELATIVE = ['learned', 'jordan_stabilized_abs']    # the score is no function of the lag alone
NO_ORDER = ['nope', 'learned', 'alibi', 'rope']        # pos_order does not change these

def base(name):
    return name.partition('+')[0]

def tau(x, L):
    return x / (1 + abs(x) / L)

def span(name, T, L):
    """s(T): the largest shear coordinate among T positions (1 without shear)."""
    if base(name) not in ('nope', 'learned', 'alibi', *JORDAN): # somebody's own: by its own account
        pos = make_pos(GPTConfig(block_size=L, n_head=1, n_embd=48, pos=name))
        return pos.span(T) if getattr(pos, 's', '') else 1
    return {'d': T, 'd/L': T / L, 'tau(d)': tau(T, L), 'tau(i)-tau(j)': tau(T, L)}.get(SHEAR.get(base(name)), 1)

def orders(names):
    """(name, m) for m = 2, 3, 4, or m = 2 alone where the order means nothing."""
    return [(name, m) for name in names for m in ((2,) if base(name) in NO_ORDER else (2, 3, 4))]

def randomise(pos, gamma_max, eta_max, seed=0):
    """Random nonzero gamma in (gamma_max/100, gamma_max] and eta in [-eta_max, eta_max], different per head and block."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in pos.named_parameters():
            r = torch.rand(p.shape, generator=g, dtype=torch.float64)
            if name == 'log_gamma':
                r.view(-1)[0] = 0.0 # one block at the maximum itself
                p.copy_(torch.log(gamma_max * 10 ** (-2 * r) / pos.gamma0))
            elif name == 'atanh_eta':
                r.view(-1)[-1] = 1.0
                p.copy_(torch.atanh(eta_max * (2 * r - 1) / pos.eta_max))
            else: # an encoding of somebody's own
                p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return pos

def build(name, T=256, L=256, nh=2, hs=16, m=2, gamma_T=8.0, eta_s=4.0, dtype=torch.float64, seed=0, grid='fast'):
    """The encoding with random gamma and eta, such that the largest gamma T is gamma_T and the largest |eta s(T)| is eta_s."""
    eta_max = eta_s / span(name, T, L)
    config = GPTConfig(block_size=L, n_head=nh, n_embd=nh * hs, pos=name, pos_order=m, pos_eta_max=1.25 * eta_max, pos_grid=grid)
    pos = randomise(make_pos(config).to(dtype), gamma_T / T, eta_max, seed)
    pos.choose_path(T)
    return pos

def positions(n, start=0):
    return torch.arange(start, start + n)

def qkv(*shape, dtype=torch.float64, seed=0):
    """Unit-normal q, k, v of this shape, (B, nh, T, hs)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]

@torch.no_grad()
def attend(pos, q, k, v, i, j):
    """The fast path."""
    return pos.attend(pos.rotate(q, i), pos.rotate(k, j), v, i, j)

@torch.no_grad()
def attend_by_definition(pos, q, k, v, i, j):
    """Softmax of the masked definition, in float64, at the values that q, k, v and the parameters have."""
    pos, q, k, v = copy.deepcopy(pos).double(), q.double(), k.double(), v.double()
    score = pos.logits(q, k, i, j).masked_fill(i[:, None] < j, -math.inf)
    return score.softmax(dim=-1) @ v

@torch.no_grad()
def operator(pos, i, j):
    """The operator G at query position i and key position j, (nh, hs, hs), read off the scores of all pairs of unit vectors."""
    units = torch.eye(pos.hs, dtype=torch.float64)[None, None]
    i, j = (torch.full((pos.hs,), p) for p in (i, j))
    return pos.logits(units, units, i, j)[0] * pos.hs ** 0.5

# -----------------------------------------------------------------------------
# scripts

# a run of a second
TINY = """--block_size=16 --n_layer=1 --n_embd=16 --n_head=2 --batch_size=4 --max_iters=2 --eval_iters=16
          --eval_rows=16 --log_interval=1 --pos=rope""".split()

@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """
    A script in this process, which saves its start-up, in tmp_path: here('train.py', *flags) ->
    status, names (its globals, None if it ended early), out, err.
    """
    monkeypatch.chdir(tmp_path)
    # what a run leaves behind in the process
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    locks, open_out_dir = [], runs.open_out_dir
    def remember(out_dir):
        locks.append(open_out_dir(out_dir))
        return locks[-1]
    monkeypatch.setattr(runs, 'open_out_dir', remember)
    def run(script, *flags):
        monkeypatch.setattr(sys, 'argv', [os.path.join(ROOT, script), *map(str, flags)])
        capfd.readouterr()
        try:
            status, names = 0, runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
        except SystemExit as e:
            status, names = e.code or 0, None
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            for lock in locks:
                lock.close()
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, names=names, out=out, err=err)
    return run

@pytest.fixture
def folders(tmp_path, monkeypatch):
    """data/ in tmp_path, for the tests in this process."""
    import data.folder
    monkeypatch.setattr(data.folder, 'folder_of', lambda name: str(tmp_path / 'data' / name))
    return tmp_path / 'data'

@pytest.fixture
def repo(tmp_path):
    """A copy of the scripts, in a folder with a space in its name."""
    copy = tmp_path / 'a repo'
    copy.mkdir()
    for name in os.listdir(ROOT):
        if name.endswith('.py'):
            shutil.copy2(os.path.join(ROOT, name), copy / name)
    ignored = shutil.ignore_patterns('*.bin', 'meta.json', '__pycache__', '*.zip', '*.npy')
    for name in ('config', 'data'):
        shutil.copytree(os.path.join(ROOT, name), copy / name, ignore=ignored)
    return copy

def start(script, *flags, cwd, repo=ROOT, before=(), **env):
    """A script as a user starts it, as a Popen."""
    return subprocess.Popen([*before, sys.executable, os.path.join(repo, script), *map(str, flags)], cwd=cwd,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                            text=True, encoding='utf-8', errors='replace',
                            env=os.environ | {'OMP_NUM_THREADS': '1'} | env)

def finish(process, status=0, timeout=120):
    """Its stdout and stderr, when it has ended with this status."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, (process.returncode, out[-2000:], err[-3000:])
    return out, err

def assert_refused(status, err, *words, code=2):
    """One line on stderr that holds the words, and this exit status."""
    lines = [line for line in err.strip().splitlines() if line]
    assert status == code and len(lines) == 1 and 'Traceback' not in err, (status, err)
    for word in words:
        assert str(word).lower() in lines[0].lower(), lines[0]

def stream(name='t', train=20000, val=3000, test=3000, seed=0, **meta):
    """A text of random letters as a folder of data/. A number is so many bytes, None no such split."""
    from data.folder import write_folder
    splits, sizes = {}, {}
    for n, (split, size) in enumerate(dict(train=train, val=val, test=test).items()):
        if size is not None:
            # the test text is the one that a seed changes
            rng = np.random.default_rng([n, seed if split == 'test' else 0])
            splits[split] = [rng.integers(97, 123, size, dtype=np.uint8)]
            sizes[split] = {'bytes': size}
    write_folder(name, splits, dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes',
                                    note='letters', splits=sizes) | meta)
