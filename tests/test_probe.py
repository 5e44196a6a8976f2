"""
The probe's figures are the published ones where they should be, its laws notice a fault, and its flips find a known kernel.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch

import probe
from common import KERNELS, save_checkpoint
from model import GPT, GPTConfig, Jordan

def close(ours, published, percent):
    """Within so many percent, or half the last printed digit."""
    return abs(ours - published) <= max(percent / 100 * abs(published), .00051)

def run(*flags, cwd, **env):
    script = os.path.join(os.path.dirname(os.path.abspath(probe.__file__)), 'probe.py')
    return subprocess.run([sys.executable, '-W', 'error', script, *flags], cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | {'OMP_NUM_THREADS': '1'} | env)

@pytest.fixture(scope='module')
def full(tmp_path_factory):
    """`python probe.py` from another directory: (stdout lines, JSON)."""
    p = run(cwd=tmp_path_factory.mktemp('elsewhere'))
    assert p.returncode == 0, p.stderr
    lines = p.stdout.splitlines()
    return lines, json.loads(lines[-1])

# -----------------------------------------------------------------------------
# regressions and reference accuracies, against the paper

def test_fixed_kernel_regression_reproduces_the_paper(full):
    out = full[1]['fits']
    for name, published in probe.MSE.items():
        for target, p in zip(('phase', 'linear', 'mixed'), published):
            ours = out[f'{target}, {name}']['mse'][-1]
            if (name, target) == ('Scaled c=.1', 'phase'): # published .011; neither float64 nor float32 gives more than .0042
                assert ours < p
                continue
            percent = {'Direct-sum': 2, 'Stabilised': 5, 'Exact/raw': 10, 'Scaled c=.1': 10}.get(name, 1)
            assert close(ours, p, percent), (name, target, ours, p)

def test_only_the_undamped_jordan_basis_holds_the_mixed_target(full):
    out = full[1]['fits']
    assert out['mixed, Raw, gamma 0']['mse'][-1] < 1e-7
    assert min(out[f'mixed, {name}']['mse'][-1] for name in probe.MSE) > 1
    assert close(out['mixed, Full-grid RoPE']['mse'][-1], 222, 5)          # the published RoPE row has the fast half of the grid
    assert out['mixed, Exact/raw']['r2'][-1] == pytest.approx(.81, abs=.01)
    assert out['ridge, Exact/raw']['1e-08'] > 50                           # its extrapolation is the ridge's doing

def test_structured_and_high_order_targets_reproduce_the_paper(full):
    out = full[1]['structured']
    for name in ('RoPE', 'ALiBi', 'RoPE+ALiBi', 'Damped RoPE'):
        assert all(close(o, p, 1) for o, p in zip(out[name]['mse'].values(), probe.MSE_STRUCTURED[name])), name
    for name in ('Direct-sum', 'Stabilised', 'Stabilised gamma 0', 'Stabilised m=3'): # motif moves in float32
        assert all(close(o, p, 5) for o, p in zip(out[name]['mse'].values(), probe.MSE_STRUCTURED[name])), name
    for r, published in probe.R2_JETS.items():
        assert list(out[f'jet r={r}']['r2'].values()) == pytest.approx(published, abs=.002)

# accuracy of the kernel at T/L = 1, 2, 4, 8, computed apart from this repo
KNOWN = {'rope, cos': (.834, .833, .833, .833), 'jordan_stabilized, tau(d) cos': (.960, .939, .917, .895),
         'jordan_stabilized_abs, (tau(i)-tau(j)) cos': (.955, .927, .891, .850), 'jordan_scaled, d e^(-.1 d/L) cos': (.994, .987, .975, .948),
         'jordan_scaled, d e^(-d/L) cos': (.934, .862, .731, .598), 'damped, e^(-1e-4 d) cos': (.824, .815, .796, .760),
         'jordan_exact, d cos': (1, 1, 1, 1), 'alibi, 1 - slope d': (.5, .5, .5, .5)}

@pytest.mark.parametrize('name', KNOWN)
def test_reference_accuracies(full, name):
    row = full[1]['reference'][name]
    assert row['accuracy'] == pytest.approx(KNOWN[name], abs=.003)         # read off pos.logits
    assert row['closed_form'] == pytest.approx(row['accuracy'], abs=.0005)

def test_shear_of_the_two_stabilised_forms(full):
    out = full[1]['shear']
    late = dict(zip(out['queries'], zip(*(out['coordinate'][n] for n in ('jordan_stabilized', 'jordan_stabilized_abs')))))
    assert late[64] == pytest.approx((60.2, 60.2), abs=.1)
    assert late[1023] == pytest.approx((60.2, 16.5), abs=.1)
    assert late[8191] == pytest.approx((60.2, .8), abs=.1)

# -----------------------------------------------------------------------------
# laws

def test_every_encoding_keeps_its_promises(full):
    out = full[1]['laws']
    assert out['broken'] == []
    assert {r['pos'] for r in out['rows']} == set(probe.POS)
    assert {r['pos'] for r in out['rows'] if not r['relative']} == {'learned', 'jordan_stabilized_abs'}
    assert all(r['expm_error'] <= 1e-9 for r in out['rows'])
    assert out['group law, jordan_stabilized'][-1] > .1 and out['local response, jordan_stabilized: |G(d) - exp(dJ)|'][0] < 1e-4

class KeysShearedTheWrongWay(Jordan):
    def exp_shear(self, x, h, transpose=False):
        return super().exp_shear(x, h if transpose else -h, transpose)

class TurnsTheWrongWay(Jordan):
    def omega(self, dtype, device):
        return -super().omega(dtype, device)

class ForgetsTheOrigin(Jordan): # the definition itself depends on the query's position
    def shear(self, i, j, dtype):
        return super().shear(i, j, dtype) + .01 * i.to(dtype)[:, None]

@pytest.mark.parametrize('fault, notices', [(KeysShearedTheWrongWay, 'float32 at 256'), (TurnsTheWrongWay, 'matrix_exp'), (ForgetsTheOrigin, 'relative law')])
@pytest.mark.parametrize('m', [2, 3])
def test_a_fault_makes_its_row_fail(monkeypatch, fault, notices, m):
    assert probe.laws_of('jordan_scaled', m)['broken'] == []
    monkeypatch.setitem(probe.POS, 'jordan_scaled', partial(fault, s='d/L', c=1.0))
    assert notices in probe.laws_of('jordan_scaled', m)['broken']

def test_a_broken_row_is_marked_and_ends_with_status_1(monkeypatch, capsys):
    monkeypatch.setitem(probe.POS, 'jordan_scaled', partial(KeysShearedTheWrongWay, s='d/L', c=1.0))
    monkeypatch.setattr(probe, 'laws', partial(probe.laws, ['nope', 'jordan_scaled']))
    probe.laws.__name__ = 'laws'
    monkeypatch.setattr(probe, 'only', 'laws')
    with pytest.raises(SystemExit) as end:
        probe.main()
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1
    assert sorted(line.split()[1] for line in lines if line.startswith('!')) == ['jordan_scaled'] * 3
    assert len(json.loads(lines[-1])['laws']['broken']) >= 3

# -----------------------------------------------------------------------------
# what a trained model learned

class Readout:
    """logits of a sum over lags of kernel times (2 bit - 1), on top of a bias, bent by `bend`."""
    def __init__(self, kernel, bend=lambda z: z):
        self.kernel, self.bend = torch.as_tensor(kernel), bend
    def __call__(self, idx):
        z = self.bend((2.0 * idx[:, :-1].double() - 1) @ self.kernel.flip(0) + .3)
        return torch.stack((-z, z, 0 * z), dim=-1)[:, None] / 2, None

@pytest.mark.parametrize('bend', [lambda z: z, lambda z: 3 * torch.tanh(z / 9)])
def test_flips_find_the_kernel_of_a_readout(bend):
    T, d = 256, np.arange(1, 256)
    kernel = KERNELS['mixed'](d, 256, probe.OMEGA) + .2 * np.exp(-d / 40)
    rows = torch.from_numpy(probe.task_rows(dict(kernel='mixed', omega=probe.OMEGA, L=T), T, 24)[:, :-1])
    found = probe.flip_kernel(Readout(kernel, bend), rows, torch.from_numpy(d)).mean(dim=0).numpy()
    assert np.corrcoef(found, kernel)[0, 1] > .99
    if bend(torch.tensor(100.0)) == 100:
        assert np.allclose(found, kernel, atol=1e-9)

def test_phase_does_not_fit_distance_times_phase():
    d = np.arange(1, 513)
    shares = lambda kernel: probe.phase_shares(kernel, d, .2)
    assert shares(.3 * np.cos(.2 * d) + 2 * np.sin(.2 * d)) == pytest.approx([1, 1])
    assert shares(d * np.cos(.2 * d)) == pytest.approx([.75, 1], abs=.02) # of d its mean alone: (1/2)^2 / (1/3)
    assert max(shares(np.random.default_rng(0).standard_normal(512))) < .03 # 4 of 512
    assert np.isnan(shares(0. * d)).all()

def test_rows_made_in_memory_follow_the_teacher():
    rows = probe.task_rows(dict(kernel='mixed', omega=.2, L=64), 64, 200)
    K = KERNELS['mixed'](np.arange(63, 0, -1), 64, .2)
    assert (rows[:, -2] == 2).all() and ((rows[:, :63] * 2 - 1) @ K > 0).astype(int).tolist() == rows[:, -1].tolist()
    assert .3 < rows[:, -1].mean() < .7

def checkpoint(path, **kw):
    torch.manual_seed(0)
    config = GPTConfig(**dict(block_size=32, vocab_size=3, n_layer=2, n_head=2, n_embd=16, pos_eta0=.01) | kw)
    save_checkpoint(path, dict(model=GPT(config).state_dict(), model_args=asdict(config), config={'dataset': 'no such data'}, iter_num=7))

@pytest.mark.parametrize('pos', ['jordan_stabilized', 'direct_sum+alibi', 'learned'])
def test_checkpoint_report(tmp_path, monkeypatch, capsys, pos):
    checkpoint(tmp_path / 'ckpt.pt', pos=pos)
    for setting in ('acc_rows', 'flip_rows'):
        monkeypatch.setattr(probe, setting, 16)
    out, drawn = probe.learned(str(tmp_path / 'ckpt.pt'))
    assert [k for k in out if k.startswith('T_')] == (['T_32'] if pos == 'learned' else ['T_32', 'T_64', 'T_128', 'T_256'])
    assert 0 <= out['T_32']['accuracy_lo'] <= out['T_32']['accuracy'] <= out['T_32']['accuracy_hi'] <= 1
    if pos == 'learned':
        assert out['layers'] == [] and 'neither' in capsys.readouterr().out
    else: # what was saved is what is shown: gamma 1e-4 per token, eta .01
        assert torch.allclose(out['layers'][1]['gamma'], torch.tensor(1e-4)) and torch.allclose(out['layers'][0]['eta'], torch.tensor(.01))
    json.dumps(probe.plain(out), allow_nan=False)

def test_checkpoint_of_another_vocabulary(tmp_path, capsys):
    checkpoint(tmp_path / 'ckpt.pt', pos='jordan_scaled', vocab_size=256)
    out, drawn = probe.learned(str(tmp_path / 'ckpt.pt'))
    assert drawn is None and len(out['layers']) == 2 and 'n/a' in capsys.readouterr().out

# -----------------------------------------------------------------------------
# as a user runs it

def test_output_pastes_into_an_issue(full):
    lines, out = full
    assert max(map(len, lines[:-1])) <= 100
    assert {'laws', 'fits', 'structured', 'reference', 'shear', 'seconds'} <= out.keys()

def test_help_and_wrong_flags(tmp_path, capsys):
    p = run('--help', cwd=tmp_path)
    assert p.returncode == 0 and 'ridge = 1e-4' in p.stdout
    p = run('--rige=1e-3', cwd=tmp_path)
    assert p.returncode == 2 and 'did you mean ridge' in p.stderr and p.stderr.count('\n') == 1
    with pytest.raises(SystemExit) as end:
        probe.learned(str(tmp_path / 'nowhere.pt'))
    assert end.value.code == 1 and 'nowhere.pt' in capsys.readouterr().err

def test_figures(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.setattr(probe, 'out_dir', str(tmp_path / 'figures'))
    lags = np.arange(1, 32)
    curve = (lags, KERNELS['mixed'](lags, 32, .2), KERNELS['mixed'](lags, 32, .2))
    paths = [draw() for draw in (probe.plot_basis, probe.plot_fits, probe.plot_scores)]
    paths.append(probe.plot_learned('rope', dict(kernel='mixed', omega=.2, L=32), {32: curve, 64: curve}))
    for path in paths:
        assert 5_000 < os.path.getsize(path) < 200_000, path
