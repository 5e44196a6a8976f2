"""
bench.py as a user runs it. What it times is not tested (a ratio on a shared machine is no law).
"""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import model
from conftest import ROOT

TINY = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--batch_size=2', '--reps=2', '--device=cpu']

pytestmark = pytest.mark.filterwarnings('error')

@pytest.fixture
def load(monkeypatch):
    """bench.py with these flags, as a module."""
    def module(*flags):
        monkeypatch.setenv('TORCHINDUCTOR_FORCE_DISABLE_CACHES', '1')
        monkeypatch.setattr(sys, 'argv', ['bench.py', '--device=cpu', *flags])
        monkeypatch.delitem(sys.modules, 'bench', raising=False)
        import bench
        return bench
    return module

@pytest.fixture
def bench(load, monkeypatch, capsys):
    """The script in this process, without the memory, which takes fresh ones."""
    def run(*flags):
        status = 0
        try:
            module = load(*TINY, *flags)
            monkeypatch.setattr(module, 'memory', lambda *args, **kw: None)
            module.main()
        except SystemExit as e:
            status = e.code
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)
    return run

def process(*flags, cwd, **env):
    """The script in a process of its own."""
    command = [sys.executable, '-W', 'error', os.path.join(ROOT, 'bench.py'), *TINY, *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | env)

def result(p):
    assert p.returncode == 0, p.stderr[-2000:]
    lines = p.stdout.splitlines()
    assert all(len(line) <= 110 for line in lines[:-1])
    return json.loads(lines[-1])

def test_steps(bench):
    """A row per encoding and length; the ratio lies within its spread."""
    out = result(bench('--pos=learned,naive', '--T=16,64', '--memory_T=0'))
    assert [(r['T'], r['pos']) for r in out['steps']] == [
        (16, 'learned'), (16, 'naive'), (64, 'learned'), (64, 'naive')]
    for r in out['steps']:
        assert r['ratio_min'] <= r['ratio'] <= r['ratio_max']
        assert 0 < r['forward_ms'] and r['compile_s'] is None
        assert r['tokens_per_s'] == pytest.approx(r['batch_size'] * r['T'] / r['step_ms'] * 1e3, rel=1e-3)

@pytest.mark.slow
def test_memory_and_picture(tmp_path):
    """Full scores show up in memory; a picture of it all."""
    out = result(process('--pos=naive', '--T=16', '--memory_T=2048', '--plot=True', cwd=tmp_path,
                         MPLBACKEND='module://nowhere'))
    (naive,) = out['memory']
    learned_mb = naive['mb'] / naive['ratio']
    # two heads of T x T scores in float32 are 32 MB
    assert naive['mb'] > 2 * 2048 * 2048 * 4 / 2**20 > 2 * learned_mb
    assert (tmp_path / 'out-bench' / 'bench.png').stat().st_size > 5000

def test_decoding_compares_equal_texts(bench):
    out = result(bench('--pos=jordan_scaled,jordan_stabilized', '--decode=True', '--decode_T=64'))
    assert [r['reach'] != 'blocks' for r in out['decode']] == [True, False]
    assert all(r['same'] == r['of'] == 64 and r['faster'] > 0 for r in out['decode'])

def test_a_bias_by_blocks_and_as_a_mask_are_the_same(bench):
    out = result(bench('--pos=rope+t5,rope+t5/masked,jordan_scaled+kerple/masked', '--T=32', '--memory_T=0'))
    assert max(out['errors'].values()) < 1e-5
    assert [r['reach'] for r in out['steps']] == ['blocks', 'T x T', 'T x T']

def test_a_wrong_encoding_is_found_before_any_timing(bench, monkeypatch):
    """With factors that forget decay and shear the errors say so, for those that have one; exit status 1."""
    monkeypatch.setattr(model.Jordan, 'carry', lambda self, x, *rest: x)
    p = bench('--pos=rope,jordan_scaled', '--steps=False', '--memory_T=0')
    errors = json.loads(p.stdout.splitlines()[-1])['errors']
    assert p.returncode == 1 and 'jordan_scaled' in p.stderr and 'rope' not in p.stderr
    assert errors['jordan_scaled'] > 0.01 and errors['rope'] < 1e-5

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def test_a_worker_that_is_killed_is_not_waited_for(load, monkeypatch):
    module = load()
    monkeypatch.setattr(module, 'memory_here', killed)
    assert module.memory('rope', 16, 1, train=False) is None

def test_flags_without_effect_on_decoding_are_named(bench):
    p = bench('--pos=rope', '--decode=True', '--decode_T=16', '--memory_T=0', '--plot=False')
    notes = [line for line in p.stdout.splitlines() if line.startswith('note: ')]
    assert notes == [f'note: {flag} has no effect with decode=True' for flag in ('memory_T', 'plot')]

@pytest.mark.slow
def test_without_a_compiler_it_goes_on_in_eager_mode(tmp_path):
    p = process('--pos=rope', '--T=16', '--memory_T=0', '--compile=True', cwd=tmp_path, CXX='/nowhere/c++')
    failed = [line for line in p.stdout.splitlines() if 'torch.compile failed' in line]
    assert p.returncode == 0 and len(failed) == 1 and 'Traceback' not in p.stderr
    assert json.loads(p.stdout.splitlines()[-1])['steps'][0]['compile_s'] is None

def test_half_precision(bench):
    out = result(bench('--pos=learned,jordan_exact', '--T=32', '--memory_T=0', '--dtype=bfloat16'))
    assert out['card']['dtype'] == 'bfloat16' and 1e-5 < max(out['errors'].values()) < 0.05

@pytest.mark.parametrize('flag, word', [
    ('--pos=rop', 'rope'), ('--pos=rope/masked', 'rope+t5/masked'), ('--pos=naive+alibi', 'naive')])
def test_what_cannot_be_measured_is_one_line(bench, flag, word):
    p = bench(flag)
    assert p.returncode == 2 and p.stderr.count('\n') == 1 and word in p.stderr
