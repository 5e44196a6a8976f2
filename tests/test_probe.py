"""
The probe's figures are the published ones where they should be; its laws notice a fault, its flips a kernel.
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
import tasks
from conftest import ROOT
from model import GPT, GPTConfig, Jordan
from runs import FORMAT
from tasks import KERNELS, KernelTask

def by_name(rows):
    return {row[next(iter(row))]: row for row in rows}

def close(ours, published, percent):
    """Within so many percent, or half the last printed digit."""
    return abs(ours - published) <= max(percent / 100 * abs(published), .00051)

# -----------------------------------------------------------------------------
# regressions and reference accuracies, against the paper

@pytest.fixture(scope='module')
def fits():
    return {target: by_name(rows) for target, rows in probe.fits().items()}

@pytest.mark.parametrize('target', ['phase', 'linear', 'mixed'])
def test_fixed_kernel_regression_reproduces_the_paper(fits, target):
    for name, row in fits[target].items():
        percent = {'Direct-sum': 2, 'Stabilised': 5, 'Exact/raw': 10, 'Scaled c=.1': 10}.get(name, 1)
        if (name, target) == ('Scaled c=.1', 'phase'): # published .011; ours is .0042, in float32 too
            assert row['MSE 8192'] < row['published']
        elif name in probe.MSE:
            assert close(row['MSE 8192'], row['published'], percent), (name, row)

def test_only_the_undamped_jordan_basis_holds_the_mixed_target(fits):
    assert fits['mixed']['Raw, gamma 0']['MSE 8192'] < 1e-7
    assert min(fits['mixed'][name]['MSE 8192'] for name in probe.MSE) > 1

def test_r2_says_how_much_a_fit_explains(fits):
    assert fits['mixed']['Exact/raw']['R2 at 8L'] == pytest.approx(.81, abs=.01)

def test_the_extrapolation_of_the_raw_basis_is_the_ridges_doing(fits):
    assert fits['ridge']['Exact/raw']['1e-08'] > 50

@pytest.fixture(scope='module')
def structured():
    return probe.structured()

@pytest.mark.parametrize('name', probe.MSE_STRUCTURED)
def test_structured_targets_reproduce_the_paper(structured, name):
    percent = 1 if 'RoPE' in name or name == 'ALiBi' else 5
    ours, published = structured[name]['ours'], structured[name]['published']
    if name == 'Exact/raw': # its motif moves between float32 and float64
        ours, published = ours[1:4], published[1:4]
    assert all(close(o, p, percent) for o, p in zip(ours, published))

@pytest.mark.parametrize('r', probe.R2_JETS)
def test_jets_of_high_order_reproduce_the_paper(structured, r):
    assert structured[f'jet r={r}']['ours'] == pytest.approx(probe.R2_JETS[r], abs=.002)

# accuracy of the kernel at T/L = 1, 2, 4, 8, computed apart from this repo
KNOWN = {
    'cos': (.834, .833, .833, .833), 'tau(d) cos': (.960, .939, .917, .895),
    '(tau(i)-tau(j)) cos': (.955, .927, .891, .850), 'd e^(-.1 d/L) cos': (.994, .987, .975, .948),
    'd e^(-d/L) cos': (.934, .862, .731, .598), 'e^(-1e-4 d) cos': (.824, .815, .796, .760),
    'd cos': (1, 1, 1, 1), '1 - slope d': (.5, .5, .5, .5)}

def test_reference_accuracies_are_those_of_the_kernels():
    rows = {row['kernel']: row for row in probe.reference()}
    for kernel, known in KNOWN.items():
        assert [rows[kernel][T] for T in ('L', '2L', '4L', '8L')] == pytest.approx(known, abs=.003), kernel

def test_the_two_stabilised_forms_differ_late():
    rows = by_name(probe.shear())
    assert [float(rows['jordan_stabilized'][i]) for i in ('64', '1023', '8191')] == [.0588] * 3
    assert [float(rows['jordan_stabilized_abs'][i]) for i in ('64', '1023', '8191')] == [.0588, .0161, .0008]

# -----------------------------------------------------------------------------
# laws

class SameMapOnBoth(Jordan):
    def carry(self, x, p, origin, sign):
        return super().carry(x, p, origin, 1)

class TurnsTheWrongWay(Jordan):
    def omega(self, dtype, device):
        return -super().omega(dtype, device)

class ForgetsTheOrigin(Jordan): # the definition itself depends on the query's position
    def shear(self, i, j, dtype):
        return super().shear(i, j, dtype) + .01 * i.to(dtype)

@pytest.mark.parametrize('fault, notices', [
    (SameMapOnBoth, 'attend at 256'), (TurnsTheWrongWay, 'matrix_exp'),
    (ForgetsTheOrigin, 'relative law')])
def test_a_fault_breaks_a_law(monkeypatch, fault, notices):
    assert probe.laws_of('jordan_scaled')[1] == []
    monkeypatch.setitem(probe.POS, 'jordan_scaled', partial(fault, s='d', c=1.0))
    assert notices in probe.laws_of('jordan_scaled')[1]

def test_a_broken_row_is_marked_and_ends_with_status_1(monkeypatch, capsys):
    monkeypatch.setitem(probe.POS, 'jordan_scaled', partial(TurnsTheWrongWay, s='d', c=1.0))
    monkeypatch.setattr(probe, 'laws', partial(probe.laws, ['nope', 'jordan_scaled']))
    probe.laws.__name__ = 'laws'
    monkeypatch.setattr(probe, 'only', 'laws')
    with pytest.raises(SystemExit) as end:
        probe.main()
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1
    assert [line.split()[0] for line in lines if line.startswith('  !')] == ['!jordan_scaled'] * 3
    assert len(json.loads(lines[-1])['laws']['broken']) >= 3

# -----------------------------------------------------------------------------
# what a trained model learned

class Readout:
    """logits of a sum over lags of kernel times (2 bit - 1), on top of a bias."""
    def __init__(self, kernel):
        self.kernel = torch.as_tensor(kernel)
    def __call__(self, idx):
        z = (2.0 * idx[:, :-1].double() - 1) @ self.kernel.flip(0) + .3
        return torch.stack((-z, z, 0 * z), dim=-1)[:, None] / 2, None

def test_flips_find_the_kernel_of_a_readout():
    d = np.arange(1, 256)
    kernel = KERNELS['mixed'](d, 256, probe.OMEGA) + .2 * np.exp(-d / 40)
    rows = torch.randint(2, (24, 256), dtype=torch.uint8)
    found = probe.flip_kernel(Readout(kernel), rows, torch.from_numpy(d)).numpy()
    assert np.allclose(found, kernel, atol=1e-9)

def test_phase_does_not_fit_distance_times_phase():
    d = np.arange(1, 513)
    shares = lambda kernel: probe.phase_shares(kernel, d, .2)
    assert shares(.3 * np.cos(.2 * d) + 2 * np.sin(.2 * d)) == pytest.approx([1, 1])
    # of d its mean alone: (1/2)^2 / (1/3)
    assert shares(d * np.cos(.2 * d)) == pytest.approx([.75, 1], abs=.02)
    assert max(shares(np.random.default_rng(0).standard_normal(512))) < .03 # 4 of 512

def checkpoint(path, dataset='synth', seed=0, **kw):
    torch.manual_seed(seed)
    config = GPTConfig(**dict(block_size=32, vocab_size=3, n_layer=2, n_head=2, n_embd=16) | kw)
    settings = dict(dataset=dataset, kernel='mixed', omega=.2, kernel_seed=None, lengths=(), seed=seed,
                    label=config.pos, block_size=config.block_size, batch_size=4,
                    gradient_accumulation_steps=1)
    torch.save(dict(model=GPT(config).state_dict(), model_args=asdict(config), config=settings, iter_num=7,
                    data='mixed omega=0.2', format=FORMAT), path)
    return str(path)

@pytest.fixture
def small(monkeypatch):
    for setting, value in dict(rows=16, flip_rows=8, flip_lags=8, temperatures=(1.0, 10.0)).items():
        monkeypatch.setattr(probe, setting, value)

def test_gamma_and_eta_are_those_of_the_checkpoint(tmp_path, small):
    out = probe.learned(checkpoint(tmp_path / 'ckpt.pt', pos='jordan_stabilized', pos_eta0=2.0))
    assert torch.allclose(out['layers'][1]['gamma_L'], torch.tensor(32 * 1e-4))
    assert torch.allclose(out['layers'][0]['eta'], torch.tensor(2.0))

def test_the_kernel_is_read_at_one_to_eight_times_the_training_length(tmp_path, small):
    out = probe.learned(checkpoint(tmp_path / 'ckpt.pt', pos='direct_sum+alibi'))
    assert [row['T'] for row in out['kernel']] == [32, 64, 128, 256]
    assert all(0 <= row['lo'] <= row['model'] <= row['hi'] <= 1 for row in out['kernel'])

@pytest.mark.parametrize('kernel, known', [('mixed', True), ('linear', False), ('random', False)])
def test_the_shares_of_phase_are_those_of_a_teacher_that_has_one(tmp_path, small, kernel, known):
    path = checkpoint(tmp_path / 'ckpt.pt', pos='rope')
    saved = torch.load(path, weights_only=True)
    saved['config']['kernel'] = kernel
    torch.save(saved, path)
    for row in probe.learned(path)['kernel']:
        assert [row[k] is not None for k in ('phase', 'd phase', 'single')] == [known] * 3

def test_other_data_than_it_was_trained_on_are_said(tmp_path, small, capsys, monkeypatch):
    path = checkpoint(tmp_path / 'ckpt.pt', pos='rope', block_size=16)
    probe.learned(path)
    assert 'note:' not in capsys.readouterr().out
    monkeypatch.setattr(KernelTask, 'checksum', 'another')
    probe.learned(path)
    assert 'note: its data' in capsys.readouterr().out

@pytest.mark.parametrize('pos', ['learned', 't5', 'rope'])
def test_a_model_without_gamma_and_eta_says_so(tmp_path, small, capsys, pos):
    out = probe.learned(checkpoint(tmp_path / 'ckpt.pt', pos=pos))
    assert all(layer == dict(gamma_L=None, eta=None) for layer in out['layers'])
    assert len(out['lengths']) == (1 if pos == 'learned' else 4)

class Parity(KernelTask):
    """Somebody's own task: two targets of four, a metric of its own, no teacher by lag."""
    vocab_size, answers, metric = 5, 4, 'bpb'
    K = property() # as if it had none

    def rows(self, rng, T, n):
        x = rng.integers(0, 4, (n, T)).astype(np.uint8)
        return torch.from_numpy(x), torch.from_numpy(x[:, -2:].astype(np.int64))

def test_a_task_of_ones_own_without_a_teacher_has_gamma_and_eta_alone(tmp_path, small, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, 'mine', Parity)
    out = probe.learned(checkpoint(tmp_path / 'ckpt.pt', 'mine', pos='jordan_scaled', vocab_size=5))
    assert len(out['layers']) == 2 and 'kernel' not in out

def test_a_task_of_ones_own_with_a_teacher_has_its_kernel_read(tmp_path, small, monkeypatch):
    class Near(KernelTask):
        def K(self, d):
            return 1.0 * (d < 5)
    monkeypatch.setitem(tasks.TASKS, 'near', Near)
    out = probe.learned(checkpoint(tmp_path / 'ckpt.pt', 'near', pos='jordan_scaled'))
    assert out['teacher'](np.array([1, 9])).tolist() == [1, 0] and len(out['kernel']) == 4

def test_the_kernels_of_several_seeds_are_one_line_for_each_length(tmp_path, small):
    models = [probe.learned(checkpoint(tmp_path / f'{n}.pt', pos='rope', seed=n)) for n in range(3)]
    rows = probe.summary(models)
    assert [(row['T/L'], row['n']) for row in rows] == [('1', 3), ('2', 3), ('4', 3), ('8', 3)]
    mean = np.mean([m['kernel'][0]['model'] for m in models])
    assert rows[0]['model'].startswith(f'{mean:.3f} ±')

# -----------------------------------------------------------------------------
# placebo

def placebo_rows(paths):
    return {(r['ckpt'], r['T'], r['temperature'], r['eta']): r for r in probe.placebos(paths)}

def test_without_shear_jordan_is_damped(tmp_path, small):
    """eta = 0 leaves the numbers of the damped model with the same weights."""
    path = checkpoint(tmp_path / 'jordan.pt', pos='jordan_exact', pos_eta0=3.0)
    damped = str(tmp_path / 'damped.pt')
    saved = torch.load(path, weights_only=True)
    saved['model'] = {k: v for k, v in saved['model'].items() if 'eta' not in k}
    saved['model_args']['pos'] = saved['config']['pos'] = 'damped'
    torch.save(saved, damped)
    rows = placebo_rows([path, damped])
    for T in (32, 256):
        assert rows[path, T, 10.0, '0']['value'] == rows[damped, T, 10.0, 'learned']['value']

def test_a_model_without_eta_is_read_at_other_temperatures_alone(tmp_path, small):
    rows = placebo_rows([checkpoint(tmp_path / 'ckpt.pt', pos='rope', attn_temperature=100.0)])
    assert [key[1:] for key in rows] == [(T, t, 'learned') for t in (1, 10, 100) for T in (32, 256)]

def test_equal_etas_may_be_shuffled(tmp_path, small):
    rows = probe.placebos([checkpoint(tmp_path / 'ckpt.pt', pos='jordan_scaled')])
    assert all(r['difference'] == 0 for r in rows if r['eta'] == 'shuffled')

def test_seeds_of_one_label_are_one_line(tmp_path, small, capsys):
    probe.placebos([checkpoint(tmp_path / f'{n}.pt', pos='jordan_scaled', seed=n) for n in range(3)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  jordan_scaled')]
    assert [line.split()[4] for line in lines] == ['3'] * 4

@pytest.mark.parametrize('what', ['config', 'data'])
def test_runs_of_one_label_that_differ_are_lines_of_their_own(tmp_path, small, capsys, what):
    paths = [checkpoint(tmp_path / f'{n}.pt', pos='rope', seed=n) for n in range(2)]
    saved = torch.load(paths[1], weights_only=True)
    saved |= {'data': 'other'} if what == 'data' else {'config': saved['config'] | {'max_iters': 9}}
    torch.save(saved, paths[1])
    probe.placebos(paths)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  rope ')]
    assert len(lines) == 8 and len({line.split('  ')[1] for line in lines}) == 2

def test_two_checkpoints_of_one_run_are_refused(tmp_path, small, capsys):
    paths = [checkpoint(tmp_path / f'{name}.pt', pos='rope') for name in ('best', 'ckpt')]
    with pytest.raises(SystemExit) as stop:
        probe.placebos(paths)
    assert stop.value.code == 1 and 'of the same run as' in capsys.readouterr().err

def test_a_checkpoint_given_twice_is_one_line(tmp_path, monkeypatch, capsys):
    path = checkpoint(tmp_path / 'a.pt', pos='rope')
    os.symlink(path, tmp_path / 'b.pt')
    monkeypatch.setattr(probe, 'placebo', True)
    monkeypatch.setattr(probe, 'ckpt', (path, str(tmp_path / 'b.pt')))
    with pytest.raises(SystemExit) as end:
        probe.main()
    assert end.value.code == 2 and 'twice' in capsys.readouterr().err

def test_lengths_that_the_task_has_not_are_said(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(KernelTask, 'available', lambda self, lengths: ((), 'test.bin has 9 tokens'))
    probe.placebos([checkpoint(tmp_path / 'ckpt.pt', pos='rope')])
    out = capsys.readouterr().out
    assert 'test.bin has 9 tokens' in out and 'Placebo' not in out

@pytest.mark.parametrize('flag', ['only', 'ridge', 'plot', 'flip_lags'])
def test_flags_without_effect_on_placebo_are_named(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.setattr(probe, 'placebo', True)
    monkeypatch.setattr(probe, 'ckpt', (str(tmp_path / 'nowhere.pt'),))
    monkeypatch.setattr(sys, 'argv', ['probe.py', f'--{flag}=1'])
    with pytest.raises(SystemExit):
        probe.main()
    assert f'note: {flag} has no effect with placebo=True' in capsys.readouterr().out

def test_placebo_takes_the_metric_of_any_task(tmp_path, small, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, 'mine', Parity)
    rows = probe.placebos([checkpoint(tmp_path / 'ckpt.pt', 'mine', pos='jordan_scaled', vocab_size=5)])
    assert {r['metric'] for r in rows} == {'bpb'} and len(rows) == 2 * 2 * 3

def test_placebo_without_a_checkpoint_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(probe, 'placebo', True)
    with pytest.raises(SystemExit) as end:
        probe.main()
    assert end.value.code == 2 and capsys.readouterr().err.count('\n') == 1

def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        probe.learned(str(tmp_path / 'nowhere.pt'))
    assert end.value.code == 1 and 'nowhere.pt' in capsys.readouterr().err

# -----------------------------------------------------------------------------
# as a user runs it

@pytest.fixture(scope='module')
def everything(tmp_path_factory):
    """
    The lines of all tables, and their folder: from another directory, on a console without Unicode, with a
    notebook's backend in the environment.
    """
    folder = tmp_path_factory.mktemp('probe')
    p = subprocess.run([sys.executable, '-W', 'error', os.path.join(ROOT, 'probe.py'), '--plot=True'],
                       cwd=folder, capture_output=True, text=True, timeout=300,
                       env=os.environ | dict(PYTHONIOENCODING='ascii', MPLBACKEND='module://nowhere'))
    assert p.returncode == 0, p.stderr
    return p.stdout.splitlines(), folder

@pytest.mark.slow
def test_output_pastes_into_an_issue(everything):
    lines, folder = everything
    assert max(map(len, lines[:-1])) <= 100
    assert {'laws', 'fits', 'structured', 'reference', 'shear', 'seconds'} <= json.loads(lines[-1]).keys()
    assert len(os.listdir(folder / 'out-probe')) == 3

@pytest.mark.slow
def test_every_encoding_keeps_its_promises(everything):
    out = json.loads(everything[0][-1])['laws']
    assert out['broken'] == []
    assert {r['encoding'] for r in out['rows']} == {*probe.POS, *probe.BIASES}
    not_relative = {r['encoding'] for r in out['rows'] if not r['relative']}
    assert not_relative == {'learned', 'jordan_stabilized_abs', 'fire'}

def test_an_unknown_setting_is_one_line(here):
    p = here('probe.py', '--rige=1e-3')
    assert p.status == 2 and 'did you mean ridge' in p.err and p.err.count('\n') == 1

def test_missing_matplotlib_is_said_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(probe, 'plot', True)
    monkeypatch.setitem(sys.modules, 'matplotlib.pyplot', None)
    with pytest.raises(SystemExit) as end:
        probe.main()
    assert end.value.code == 2 and not capsys.readouterr().out

@pytest.mark.slow
def test_the_picture_of_learned_kernels_has_a_row_for_each_model(tmp_path, small, monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.setattr(probe, 'out_dir', str(tmp_path))
    models = [probe.learned(checkpoint(tmp_path / f'{pos}.pt', pos=pos)) for pos in ('rope', 'jordan_scaled')]
    assert os.path.getsize(probe.plot_learned(models)) > 10_000
