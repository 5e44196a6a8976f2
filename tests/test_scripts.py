"""
The scripts as a user runs them: from another directory, with wrong flags, killed, resumed, on damaged files.
Everything runs in a copy of the repo, so that no data set of the user's is made anew in other sizes.
"""

import csv
import hashlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = '--block_size=16 --n_embd=16 --n_head=2 --batch_size=4 --eval_iters=32 --eval_rows=32 --log_interval=1 --warmup_iters=2'.split()

@pytest.fixture(scope='session')
def repo(tmp_path_factory):
    """A copy of the scripts, in a folder with a space in its name, with the tiny synthetic data set made."""
    copy = tmp_path_factory.mktemp('a repo') / 'nano jordan'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.git', '*.bin', '*.pt', 'out*', 'meta.json', '__pycache__', '.venv', 'venv', 'results'))
    run(copy, 'data/synth/prepare.py', '--L=16', '--train_rows=24000', cwd=copy)
    return copy

def run(repo, script, *flags, cwd, ok=True, timeout=120, warnings='error', **env):
    """A script by subprocess; its stdout. With ok=False the finished process."""
    p = subprocess.run([sys.executable, '-W', warnings, os.path.join(repo, script), *map(str, flags)], cwd=cwd, capture_output=True, text=True,
                       timeout=timeout, stdin=subprocess.DEVNULL, env=os.environ | {'OMP_NUM_THREADS': '1'} | env)
    if ok:
        assert p.returncode == 0, p.stderr[-3000:]
        return p.stdout
    return p

def train_here(repo, capfd, monkeypatch, *flags, script='train.py'):
    """A script in this process (no start-up to wait for): (exit status, globals or None, stdout, stderr)."""
    monkeypatch.setattr(sys, 'argv', [os.path.join(repo, script), *map(str, flags)])
    for name in ('common', 'configurator', 'model'): # the copy's, not this repo's
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(repo))
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    capfd.readouterr()
    try:
        status, names = 0, runpy.run_path(os.path.join(repo, script), run_name='__main__')
    except SystemExit as e:
        status, names = e.code, None
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return status, names, *capfd.readouterr()

def losses(out_dir):
    with open(os.path.join(out_dir, 'log.jsonl')) as f:
        lines = [json.loads(line) for line in f]
    return {r['iter']: r['loss'] for r in lines if 'loss' in r}, {r['iter']: r['val_loss'] for r in lines if 'val_loss' in r}

def assert_refused(status, stderr, *words, code=2):
    """One line on stderr that holds the words, and this exit status."""
    lines = [l for l in stderr.strip().splitlines() if l]
    assert status == code, stderr
    assert len(lines) == 1 and 'Traceback' not in stderr, stderr
    for word in words:
        assert str(word).lower() in lines[0].lower(), lines[0]

# -----------------------------------------------------------------------------
# the main job

def test_train_reports_one_json_row_from_any_directory(repo, tmp_path):
    """The last line is the csv row, flat, with an interval at every length; nothing but out_dir and results.csv appears in the shell's directory."""
    out = run(repo, 'train.py', 'config/smoke.py', *TINY, '--max_iters=3', '--pos=jordan_scaled+alibi', '--pos_c=0.5', cwd=tmp_path)
    row = json.loads(out.splitlines()[-1])
    assert row['pos'] == 'jordan_scaled+alibi' and row['pos_c'] == 0.5 and row['iters'] == 3 and row['seed'] == 0
    for T in (16, 32, 64, 128):
        assert 0 <= row[f'acc_{T}_lo'] <= row[f'acc_{T}'] <= row[f'acc_{T}_hi'] <= 1
    assert sorted(os.listdir(tmp_path)) == ['out-smoke', 'results.csv']
    with open(tmp_path / 'results.csv', newline='') as f:
        (line,) = csv.DictReader(f)
    assert json.loads(line['metrics'])['acc_128'] == row['acc_128'] and line['config_hash'] == row['config_hash']
    assert str(tmp_path) not in (tmp_path / 'results.csv').read_text()
    assert {'ckpt.pt', 'best.pt', 'log.jsonl'} == set(os.listdir(tmp_path / 'out-smoke'))

def test_same_command_same_losses_and_same_batches_for_every_encoding(repo, tmp_path, capfd, monkeypatch):
    seen = {}
    for pos in ('rope', 'jordan_stabilized', 'jordan_stabilized'):
        status, g, out, err = train_here(repo, capfd, monkeypatch, *TINY, f'--pos={pos}', '--max_iters=4', f'--out_dir={tmp_path}/o', '--eval_lens=16')
        assert status == 0, err
        batches = hashlib.sha256(b''.join(t.numpy().tobytes() for it in range(50) for t in g['get_batch'](it, 0))).hexdigest()
        seen.setdefault(pos, []).append((batches, losses(tmp_path / 'o')))
    (rope,), (first, second) = seen['rope'], seen['jordan_stabilized']
    assert first == second
    assert rope[0] == first[0] and rope[1] != first[1]

def test_no_row_is_drawn_twice_within_an_epoch_and_seeds_differ(repo, tmp_path, capfd, monkeypatch):
    orders = []
    for seed in (0, 1):
        _, g, *_ = train_here(repo, capfd, monkeypatch, *TINY, '--pos=nope', f'--seed={seed}', '--max_iters=1', '--batch_size=3000', f'--out_dir={tmp_path}/o', '--eval_lens=16')
        rows = np.concatenate([g['get_batch'](it, 0)[0].numpy() for it in range(8)])
        assert sorted(map(bytes, rows.astype(np.uint8))) == sorted(map(bytes, np.asarray(g['rows']['train'][:, :-1])))
        orders.append(rows)
    assert not np.array_equal(*orders)

def test_processes_draw_different_batches(repo, tmp_path, capfd, monkeypatch):
    """Micro-batches are told apart by their number, which torchrun's ranks share out: no two are the same rows."""
    _, g, *_ = train_here(repo, capfd, monkeypatch, *TINY, '--pos=nope', '--max_iters=0', '--gradient_accumulation_steps=4', '--eval_lens=16', f'--out_dir={tmp_path}/o')
    batches = [g['get_batch'](it, micro)[0].numpy().tobytes() for it in range(5) for micro in range(4)]
    assert len(set(batches)) == len(batches)

def test_evaluation_does_not_depend_on_the_batch_size(repo, tmp_path, capfd, monkeypatch):
    status, g, *_ = train_here(repo, capfd, monkeypatch, *TINY, '--pos=damped', '--max_iters=2', f'--out_dir={tmp_path}/o')
    common = sys.modules['common']
    results = []
    for tokens in (200, 1000, 16384):
        monkeypatch.setattr(common, 'TOKENS_PER_FORWARD', tokens)
        results.append(common.score_rows(g['raw_model'], g['rows'][64], 'cpu', g['context'])[0])
    assert np.allclose(results[0], results[1], atol=1e-5) and np.allclose(results[0], results[2], atol=1e-5)

@pytest.mark.skipif(not torch.distributed.is_available(), reason='torch without distributed')
def test_two_processes_equal_one(repo, tmp_path):
    """torchrun with 2 gloo processes trains on the same global batch as one process, and only rank 0 writes."""
    flags = [*TINY, '--max_iters=3', '--gradient_accumulation_steps=2', '--dropout=0.1', '--eval_interval=2', '--eval_lens=16']
    run(repo, 'train.py', *flags, '--out_dir=one', cwd=tmp_path)
    p = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', os.path.join(repo, 'train.py'), *flags, '--out_dir=two'],
                       cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert p.returncode == 0, p.stderr[-3000:]
    one, two = (torch.load(tmp_path / d / 'ckpt.pt', weights_only=True)['model'] for d in ('one', 'two'))
    for k in one:
        assert torch.allclose(one[k], two[k], atol=1e-5), k
    assert np.allclose(list(losses(tmp_path / 'one')[1].values()), list(losses(tmp_path / 'two')[1].values()), atol=1e-5)
    assert len((tmp_path / 'results.csv').read_text().splitlines()) == 3 # a header and a row each
    p = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', os.path.join(repo, 'train.py'), *TINY, '--gradient_accumulation_steps=3'],
                       cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode != 0 and 'gradient_accumulation_steps=3: expected a multiple of the 2 processes' in p.stderr

# -----------------------------------------------------------------------------
# resume

RESUME = [*TINY, '--dropout=0.2', '--gradient_accumulation_steps=2', '--eval_interval=3', '--eval_lens=16,32', '--lr_decay_iters=8', '--pos=jordan_scaled']

def test_resume_is_exact(repo, tmp_path):
    """3 iterations and 5 more equal 8 straight: every loss, with dropout, accumulation and an evaluation on the boundary."""
    run(repo, 'train.py', *RESUME, '--max_iters=8', '--out_dir=straight', cwd=tmp_path)
    run(repo, 'train.py', *RESUME, '--max_iters=3', '--out_dir=parts', '--results=p.csv', cwd=tmp_path)
    run(repo, 'train.py', *RESUME, '--max_iters=8', '--out_dir=parts', '--results=p.csv', '--init_from=resume', cwd=tmp_path)
    (train, val), (train2, val2) = losses(tmp_path / 'straight'), losses(tmp_path / 'parts')
    assert train.keys() == train2.keys() == set(range(8)) and val.keys() == val2.keys()
    for a, b in ((train, train2), (val, val2)):
        assert max(abs(a[k] - b[k]) for k in a) < 1e-6
    one, two = (torch.load(tmp_path / d / 'ckpt.pt', weights_only=True)['model'] for d in ('straight', 'parts'))
    assert all(torch.equal(one[k], two[k]) for k in one)

    # a finished run that is resumed adds no second row
    before = (tmp_path / 'p.csv').read_text()
    run(repo, 'train.py', *RESUME, '--max_iters=8', '--out_dir=parts', '--results=p.csv', '--init_from=resume', cwd=tmp_path)
    assert (tmp_path / 'p.csv').read_text() == before

def test_a_signal_saves_and_ends_with_the_usual_status(repo, tmp_path):
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        p = subprocess.Popen([sys.executable, os.path.join(repo, 'train.py'), *TINY, '--max_iters=100000', '--eval_interval=100000', f'--out_dir=o{status}'],
                             cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in p.stdout:
            if line.startswith('iter 3: loss'):
                break
        p.send_signal(number)
        out, err = p.communicate(timeout=60)
        assert p.returncode == status and 'Traceback' not in err and '--init_from=resume goes on' in out
        assert torch.load(tmp_path / f'o{status}' / 'ckpt.pt', weights_only=True)['iter_num'] >= 4

def test_killed_at_any_instant_it_resumes(repo, tmp_path):
    """SIGKILL at random instants while every iteration saves: what is on disk always loads, and the run always goes on."""
    rng, flags = random.Random(0), [*TINY, '--max_iters=100000', '--eval_interval=1', '--out_dir=o', '--eval_iters=1']
    reached = -1
    for kill in range(4):
        p = subprocess.Popen([sys.executable, os.path.join(repo, 'train.py'), *flags, *(['--init_from=resume'] if kill else [])],
                             cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in p.stdout: # it has gone on from where it was
            if line.startswith('iter ') and int(line.split()[1].strip(':')) > max(reached, 0) + 1:
                break
        time.sleep(rng.uniform(0, 0.5))
        p.kill()
        assert 'Traceback' not in p.communicate()[1]
        reached, last = torch.load(tmp_path / 'o' / 'ckpt.pt', weights_only=True)['iter_num'], reached
        assert reached > last

def test_resume_refuses_what_contradicts_the_checkpoint(repo, tmp_path, capfd, monkeypatch):
    flags = [*TINY, f'--out_dir={tmp_path}/o', '--max_iters=2', '--eval_lens=16']
    assert train_here(repo, capfd, monkeypatch, *flags, '--pos=rope')[0] == 0
    for flag, old, new in (('--pos=nope', 'rope', 'nope'), ('--n_layer=3', '2', '3'), ('--learning_rate=0.5', '0.001', '0.5'), ('--pos_theta=500', '10000', '500')):
        status, _, out, err = train_here(repo, capfd, monkeypatch, *flags, '--pos=rope', '--init_from=resume', flag)
        assert_refused(status, err, flag[2:].split('=')[0], old, new, 'ckpt.pt')
    status, *_ , err = train_here(repo, capfd, monkeypatch, *flags, '--init_from=gpt2')
    assert_refused(status, err, 'init_from', 'scratch', 'resume')

def test_damaged_checkpoints_are_one_line(repo, tmp_path, capfd, monkeypatch):
    flags = [*TINY, '--pos=jordan_exact', '--max_iters=2', '--eval_lens=16', f'--out_dir={tmp_path}/o']
    assert train_here(repo, capfd, monkeypatch, *flags)[0] == 0
    good = (tmp_path / 'o' / 'ckpt.pt').read_bytes()
    checkpoint = torch.load(tmp_path / 'o' / 'ckpt.pt', weights_only=True)
    def foreign(change):
        c = {k: dict(v) if isinstance(v, dict) else v for k, v in checkpoint.items()}
        change(c)
        torch.save(c, tmp_path / 'o' / 'ckpt.pt')
    resume = lambda: train_here(repo, capfd, monkeypatch, *flags, '--init_from=resume')
    for damage in (b'', b'not a checkpoint', good[:len(good) // 2], good[:2000] + b'\0' * 4000 + good[6000:]):
        (tmp_path / 'o' / 'ckpt.pt').write_bytes(damage)
        status, _, out, err = resume()
        assert_refused(status, err, 'ckpt.pt', code=1)
    torch.save({'a': 1}, tmp_path / 'o' / 'ckpt.pt')
    status, _, out, err = resume()
    assert_refused(status, err, 'ckpt.pt', 'not a checkpoint', code=1)
    foreign(lambda c: c['model'].pop('lm_head.weight'))
    status, _, out, err = resume()
    assert_refused(status, err, 'ckpt.pt', 'lm_head.weight', code=1)
    os.remove(tmp_path / 'o' / 'ckpt.pt')
    status, _, out, err = resume()
    assert_refused(status, err, 'ckpt.pt', 'no checkpoint', code=1)
    # prefixes of torch.compile and DDP are stripped, a field it lacks takes its default
    foreign(lambda c: (c.update(model={f'module._orig_mod.{k}': v for k, v in c['model'].items()}), c['model_args'].pop('pos_grid')))
    status, _, out, err = resume()
    assert status == 0, err

def test_a_full_disk_leaves_the_last_checkpoint(repo, tmp_path, monkeypatch):
    """A write that fails half way: the old file is intact and no temporary is left."""
    monkeypatch.syspath_prepend(str(repo))
    import common
    common.save_checkpoint(str(tmp_path / 'c.pt'), {'a': torch.ones(3)})
    def full(checkpoint, f):
        f.write(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(SystemExit, match='1'):
        common.save_checkpoint(str(tmp_path / 'c.pt'), {'a': torch.zeros(3)})
    assert os.listdir(tmp_path) == ['c.pt'] and torch.load(tmp_path / 'c.pt', weights_only=True)['a'].sum() == 3

# -----------------------------------------------------------------------------
# numbers that lie

def test_a_run_that_diverges_stops_and_keeps_its_checkpoint(repo, tmp_path, capfd, monkeypatch):
    flags = [*TINY, f'--out_dir={tmp_path}/o', '--eval_lens=16', '--eval_interval=2', '--grad_clip=0', '--warmup_iters=0']
    assert train_here(repo, capfd, monkeypatch, *flags, '--max_iters=2')[0] == 0
    before = (tmp_path / 'o' / 'ckpt.pt').read_bytes()
    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, 'cross_entropy', lambda x, y, **k: cross_entropy(x, y, **k) * (1 if 'reduction' in k else float('nan')))
    status, _, out, err = train_here(repo, capfd, monkeypatch, *flags, '--max_iters=9')
    assert_refused(status, err, 'nan at iteration', 'lr', 'float32', code=1)
    assert (tmp_path / 'o' / 'ckpt.pt').read_bytes() == before

def test_best_is_the_best_whatever_comes_after(repo, tmp_path, capfd, monkeypatch):
    """Under a learning rate that makes the validation loss jump, and across a resume, best.pt is of the lowest one, and ckpt.pt of the last."""
    flags = [*TINY, '--pos=rope', f'--out_dir={tmp_path}/o', '--eval_lens=16', '--eval_interval=1', '--learning_rate=0.3', '--warmup_iters=0', '--lr_decay_iters=12', '--decay_lr=False']
    assert train_here(repo, capfd, monkeypatch, *flags, '--max_iters=6')[0] == 0
    assert train_here(repo, capfd, monkeypatch, *flags, '--max_iters=12', '--init_from=resume')[0] == 0
    _, val = losses(tmp_path / 'o')
    del val[0] # an untrained model is none
    ckpt, best = (torch.load(tmp_path / 'o' / f, weights_only=True) for f in ('ckpt.pt', 'best.pt'))
    lowest = min(val, key=val.get)
    assert lowest < 12 and max(val.values()) > 1.05 * val[lowest], 'a loss that only falls would prove nothing'
    assert best['iter_num'] == lowest and ckpt['iter_num'] == 12
    assert best['best_val_loss'] == ckpt['best_val_loss'] == pytest.approx(val[lowest], abs=1e-6)

def test_learning_rate_schedule_at_its_edges(repo, tmp_path, capfd, monkeypatch):
    for warmup, decay, iters in itertools.product((0, 5, 20), (0, 5, 20), (20,)):
        status, g, *_ = train_here(repo, capfd, monkeypatch, *TINY, '--pos=nope', '--max_iters=0', '--eval_lens=16', f'--warmup_iters={warmup}',
                                   f'--lr_decay_iters={decay}', '--learning_rate=1', '--min_lr=0.1', f'--out_dir={tmp_path}/o')
        rates = [g['get_lr'](it) for it in range(2 * iters)]
        assert status == 0 and all(0 < r <= 1 for r in rates) and rates[-1] == 0.1
        assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
        if warmup < decay:
            assert rates[warmup] == 1

def test_rows_of_concurrent_runs_do_not_mix(repo, tmp_path):
    code = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom common import append_row\n"
            "for n in range(200): append_row('r.csv', {'who': sys.argv[2], 'n': n, 'text': 'x' * 500})")
    processes = [subprocess.Popen([sys.executable, '-c', code, repo, str(k)], cwd=tmp_path) for k in range(3)]
    assert [p.wait() for p in processes] == [0, 0, 0]
    with open(tmp_path / 'r.csv', newline='') as f:
        rows = list(csv.DictReader(f))
    assert sorted((r['who'], int(r['n'])) for r in rows) == [(str(k), n) for k in range(3) for n in range(200)]
    assert all(r['text'] == 'x' * 500 for r in rows)

# -----------------------------------------------------------------------------
# flags and configs

@pytest.mark.parametrize('flag, words', [
    ('--batch_sise=3', ['batch_sise', 'did you mean batch_size']), ('--zzz=1', ['zzz', '--help']), ('--pos', ['--pos=VALUE']), ('-pos=rope', ['-pos=rope']),
    ('--pos=jordan', ['jordan', 'one of']), ('--pos=jordan_stabilised', ['did you mean', 'jordan_stabilized']), ('--pos=learned+alibi', ['learned+alibi']),
    ('--pos=', ['pos']), ('--n_embd=130', ['n_embd=130', 'n_head=4', '132']), ('--n_embd=20', ['multiple of 4', 'head size', 'n_embd=32']),
    ('--pos_order=3', ['order m=3', 'multiple of 6']), ('--eval_interval=0', ['eval_interval=0', '1 <= eval_interval']), ('--batch_size=-1', ['batch_size']),
    ('--batch_size=many', ['batch_size=many', 'whole number']), ('--batch_size=1.5', ['whole number']), ('--batch_size=', ['whole number']),
    ('--learning_rate=nan', ['finite']), ('--learning_rate=-1', ['learning_rate']), ('--learning_rate=1e-3x', ['finite number']), ('--dropout=1', ['dropout']),
    ('--always_save_checkpoint=maybe', ['True or False']), ('--pos_eta0=0.1', ['pos_eta0', 'pos_eta_max']), ('--eval_lens=16,x', ['eval_lens']), ('--eval_lens=1', ['eval_lens']),
    ('--device=tpu', ['device', 'cpu']), ('--dtype=float8', ['dtype', 'bfloat16']), ('--dtype=float16', ['float16', 'CUDA']), ('--init_from=gpt2', ['init_from']),
    ('config/none.py', ['config/none.py', 'no such config file']), ('config/smok.py', ['did you mean config/smoke.py']), ('--backend=mpi', ['backend']),
    ('--pos_grid=slow', ['pos_grid']), ('--seed=-1', ['seed']), ('--pos_gamma0=-1', ['pos_gamma0']), ('--compile=perhaps', ['True or False'])])
def test_a_wrong_flag_is_one_line(repo, tmp_path, capfd, monkeypatch, flag, words):
    monkeypatch.chdir(tmp_path)
    status, _, out, err = train_here(repo, capfd, monkeypatch, flag)
    assert_refused(status, err, *words)
    assert os.listdir(tmp_path) == [] # before anything was touched

def test_every_number_refuses_zero_negative_and_absurd_or_runs(repo, tmp_path, capfd, monkeypatch):
    """For every numeric setting: 0, -1, 1e30 is either refused in one line that names the setting, or the run ends well."""
    _, g, *_ = train_here(repo, capfd, monkeypatch, *TINY, '--pos=nope', '--max_iters=0', '--eval_lens=16', f'--out_dir={tmp_path}/o')
    numeric = [k for k, v in g['config'].items() if type(v) in (int, float) or v is None]
    assert {'batch_size', 'pos_gamma0', 'learning_rate', 'lr_decay_iters'} <= set(numeric)
    for key, value in itertools.product(numeric, ('0', '-1', '1e30')):
        if key == 'compile':
            continue
        status, _, out, err = train_here(repo, capfd, monkeypatch, *TINY, '--max_iters=1', '--eval_lens=16', f'--out_dir={tmp_path}/o', f'--{key}={value}')
        if status:
            if value == '1e30' and key in ('learning_rate', 'weight_decay', 'min_lr', 'pos_lr_mult'):
                assert_refused(status, err, code=1) # it diverges, and says so
            else:
                assert_refused(status, err, key)

def test_spellings_that_work(repo, tmp_path, capfd, monkeypatch):
    """1e3 for an int, an int for a float, none, true, a value with '=', flags before the config file."""
    config = tmp_path / 'my config.py'
    config.write_text("learning_rate = 1\nbatch_size = 8.0\neval_lens = [16, 32]\nimport math\n_helper = 3\nwandb_run_name = f'x{batch_size}'\npos = 'rope'\n")
    status, g, out, err = train_here(repo, capfd, monkeypatch, '--pos=nope', *TINY, '--wandb_project=a=b', '--eval_iters=1e2', '--pos_gamma0=none', '--bias=TRUE',
                                     '--decay_lr=0', '--weight_decay=0', str(config), '--max_iters=0', f'--out_dir={tmp_path}/o')
    assert status == 0, err
    c = g['config']
    assert (c['pos'], c['learning_rate'], c['batch_size'], c['eval_lens'], c['wandb_project']) == ('nope', 1.0, 4, (16, 32), 'a=b')
    assert (c['eval_iters'], c['pos_gamma0'], c['bias'], c['decay_lr'], c['wandb_run_name']) == (100, None, True, False, 'x8.0')
    assert type(c['learning_rate']) is float and type(c['eval_iters']) is int

@pytest.mark.parametrize('text, words', [
    ('batch_size = = 3\n', ['line 1']), ('\n\nx = undefined\n', ['line 3', 'undefined']), ('batch_sise = 3\n', ['batch_sise', 'did you mean batch_size']),
    ("batch_size = '3'\n", ['batch_size', 'whole number']), ('learning_rate = float("nan")\n', ['learning_rate']), ('batch_size = 0\n', ['batch_size'])])
def test_a_wrong_config_file_is_one_line(repo, tmp_path, capfd, monkeypatch, text, words):
    (tmp_path / 'c.py').write_text(text)
    status, _, out, err = train_here(repo, capfd, monkeypatch, str(tmp_path / 'c.py'))
    assert_refused(status, err, *words)

def test_help_prints_the_default_block(repo, tmp_path):
    for script in ('train.py', 'data/synth/prepare.py'):
        out = run(repo, script, '--help', cwd=tmp_path)
        for line in re.findall(r'^\w+(?:: [^=\n]+)? = .*$', open(os.path.join(repo, script)).read().split('# ' + '-' * 77)[1], flags=re.M):
            assert line in out

def test_fuzzed_flags_never_end_in_a_traceback(repo, tmp_path, capfd, monkeypatch):
    rng = random.Random(1)
    monkeypatch.syspath_prepend(str(repo))
    from configurator import configure
    defaults = dict(a=1, b=2.0, c=True, d='x', e=(), f=None, __annotations__={'e': tuple[int, ...], 'f': float | None})
    for _ in range(500):
        argv = [rng.choice(['--', '-', '']) + rng.choice(['a', 'b', 'c', 'd', 'e', 'f', 'g', '']) + rng.choice(['=', '==', '']) +
                ''.join(rng.choices('0123456789.-+eE_,=noneTrue \0é', k=rng.randrange(6))) for _ in range(rng.randrange(1, 3))]
        g = dict(defaults)
        try:
            config = configure(g, {'x >= 0': 'a b f'}, argv)
            assert type(config['a']) is int and type(config['b']) is float and type(config['c']) is bool and config['a'] >= 0
        except SystemExit as e:
            assert_refused(e.code, capfd.readouterr().err)

# -----------------------------------------------------------------------------
# machines

def test_device_choice_by_what_there_is(repo, monkeypatch, capfd):
    """cuda before mps before cpu; bfloat16 only where it is supported; compile on CUDA only; asking for what is not there is one line."""
    monkeypatch.syspath_prepend(str(repo))
    import common
    def machine(cuda, mps, bf16=True):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda)
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda: bf16)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
        monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    for (cuda, mps, bf16), chosen in {(True, True, True): ('cuda', 'bfloat16', True), (True, False, False): ('cuda', 'float32', True),
                                      (False, True, True): ('mps', 'float32', False), (False, False, True): ('cpu', 'float32', False)}.items():
        machine(cuda, mps, bf16)
        assert common.choose_device('', '', None) == chosen
    machine(True, False)
    assert common.choose_device('cuda:1', 'float16', False) == ('cuda:1', 'float16', False)
    for args in (('cuda:2', '', None), ('cuda:x', '', None), ('mps', '', None), ('gpu', '', None), ('cpu', 'float16', None), ('', 'float64', None)):
        with pytest.raises(SystemExit) as e:
            common.choose_device(*args)
        assert_refused(e.value.code, capfd.readouterr().err, args[0] or args[1])

@pytest.mark.parametrize('compiler', ['/nonexistent', '/bin/false'])
def test_compile_that_fails_falls_back_to_eager_with_one_line(repo, tmp_path, compiler):
    """No compiler, and one that fails."""
    out = run(repo, 'train.py', *TINY, '--pos=rope', '--max_iters=2', '--compile=True', '--eval_lens=16', cwd=tmp_path,
              warnings='ignore', CXX=compiler, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache'))
    said = [line for line in out.splitlines() if 'torch.compile failed' in line]
    assert len(said) == 1 and 'C++ compiler' in said[0] and 'eager' in said[0] and 'compile=False' in out and json.loads(out.splitlines()[-1])['iters'] == 2

@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'probe.py', 'bench.py', 'ablate.py', 'data/synth/prepare.py', 'data/text/prepare.py', 'data/wikitext103/prepare.py'])
def test_ctrl_c_while_torch_loads_is_one_line(repo, tmp_path, script):
    (tmp_path / 'torch.py').write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n") # for as long as the test needs
    p = subprocess.Popen([sys.executable, os.path.join(repo, script), 'x'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {'PYTHONPATH': str(tmp_path)}, cwd=tmp_path)
    assert p.stdout.readline() == 'loading\n'
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert_refused(p.returncode, err, 'interrupted', code=130)

def test_two_runs_that_want_other_rows_at_once(repo, tmp_path):
    """Both make data/synth for themselves, one after the other; neither trains on the other's rows."""
    flags = [f for f in TINY if 'block_size' not in f] + ['--pos=rope', '--max_iters=2', '--compile=False']
    runs = [subprocess.Popen([sys.executable, os.path.join(repo, 'train.py'), *flags, f'--block_size={L}', f'--eval_lens={L}', f'--out_dir={tmp_path}/o{L}'],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'}) for L in (8, 12, 16)]
    try:
        for p, L in zip(runs, (8, 12, 16)):
            out, err = p.communicate(timeout=120)
            assert p.returncode == 0 and json.loads(out.splitlines()[-1])['block_size'] == L, err
    finally: # the suite's own rows
        run(repo, 'data/synth/prepare.py', '--L=16', '--train_rows=24000', cwd=tmp_path)

def test_memory_does_not_grow_with_the_data_file(repo, tmp_path):
    """A training file of 300 MB costs less than 30 MB more than one of 1 MB, by peak resident memory."""
    def peak(size):
        folder = os.path.join(repo, 'data/t')
        stream(repo, 't', np.zeros(1000, np.uint8), np.zeros(1000, np.uint8))
        with open(os.path.join(folder, 'train.bin'), 'r+b') as f:
            f.truncate(size)
        code = (f"import sys, runpy; sys.argv = {['train.py', *TINY, '--pos=rope', '--dataset=t', '--max_iters=40', '--eval_lens=16', f'--out_dir={tmp_path}/o']!r}\n"
                f"sys.path.insert(0, {str(repo)!r})\nrunpy.run_path({os.path.join(repo, 'train.py')!r}, run_name='__main__')\n"
                "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])")
        p = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
        assert p.returncode == 0, p.stderr
        return int(p.stdout.splitlines()[-1]) / 1024
    assert peak(300 * 2**20) < peak(2**20) + 30

def test_an_out_dir_that_cannot_be_is_one_line(repo, tmp_path, capfd, monkeypatch):
    (tmp_path / 'file').write_text('')
    status, _, out, err = train_here(repo, capfd, monkeypatch, *TINY, '--pos=rope', f'--out_dir={tmp_path}/file/o')
    assert_refused(status, err, 'out_dir', 'another --out_dir', code=1)

def test_c_locale_and_no_home(repo, tmp_path):
    run(repo, 'train.py', *TINY, '--max_iters=1', '--eval_lens=16', cwd=tmp_path, LC_ALL='C', PYTHONUTF8='0', HOME='/nonexistent')

# -----------------------------------------------------------------------------
# data

def stream(repo, name, train=range(0, 200), val=range(0, 200), dtype='uint8', **meta):
    """A text data set of the repo's copy, with whatever faults."""
    folder = os.path.join(repo, 'data', name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for split, tokens in (('train', train), ('val', val)):
        np.array(list(tokens)).astype(dtype).tofile(os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.json'), 'w') as f:
        json.dump(dict(kind='stream', vocab_size=256, dtype=dtype) | meta, f)
    return folder

def test_faulty_data_is_one_line(repo, tmp_path, capfd, monkeypatch):
    flags = [*TINY, '--pos=rope', '--max_iters=1', '--dataset=t', '--eval_lens=16,64', f'--out_dir={tmp_path}/o']
    def refused(*words, flags=flags):
        status, _, out, err = train_here(repo, capfd, monkeypatch, *flags)
        assert_refused(status, err, *words, code=1)
    refused('none', 'meta.json', flags=[*flags, '--dataset=none'])
    stream(repo, 't', train=range(16)); refused('train.bin', '16 tokens', '17', 'block_size') # one token too short
    stream(repo, 't', val=range(64)); refused('val.bin', '64 tokens', '65', 'eval_lens')
    stream(repo, 't', train=[]); refused('train.bin', 'empty')
    stream(repo, 't', vocab_size=100); refused('train.bin', 'token 199', 'vocabulary of 100')
    folder = stream(repo, 't', dtype='uint16'); open(os.path.join(folder, 'val.bin'), 'ab').write(b'x'); refused('val.bin', '401 bytes', '2-byte')
    folder = stream(repo, 't'); os.remove(os.path.join(folder, 'val.bin')); refused('val.bin', 'missing')
    for damage in ('', '{', '[]', '{"kind": "stream"}', '{"kind": "stream", "vocab_size": "x", "dtype": "uint8"}', '{"kind": "rows", "vocab_size": 3, "dtype": "uint8"}'):
        folder = stream(repo, 't')
        with open(os.path.join(folder, 'meta.json'), 'w') as f:
            f.write(damage)
        refused('meta.json', 'damaged')
    stream(repo, 't')
    status, g, out, err = train_here(repo, capfd, monkeypatch, *flags)
    assert status == 0, err
    stream(repo, 't', vocab_size=300, dtype='uint16') # the checkpoint's vocabulary is another
    status, _, out, err = train_here(repo, capfd, monkeypatch, *flags, '--init_from=resume', '--max_iters=2')
    assert_refused(status, err, 'vocab_size', '256', '300')

def test_random_data_sets_never_end_in_a_traceback(repo, tmp_path, capfd, monkeypatch):
    rng = np.random.default_rng(0)
    for _ in range(25):
        stream(repo, 't', rng.integers(0, 256, rng.integers(0, 60)), rng.integers(0, 256, rng.integers(0, 60)), rng.choice(['uint8', 'uint16']), vocab_size=int(rng.integers(200, 300)))
        status, _, out, err = train_here(repo, capfd, monkeypatch, *TINY, '--pos=rope', '--max_iters=1', '--dataset=t', '--eval_lens=16,32', f'--out_dir={tmp_path}/o')
        if status:
            assert_refused(status, err, 't/', code=1)

def test_text_scores_the_same_targets_at_every_length(repo, tmp_path, capfd, monkeypatch):
    """A model that ignores its context has the same bits per byte at every length: longer is not easier."""
    rng = np.random.default_rng(0)
    stream(repo, 't', rng.integers(0, 256, 4000), np.sort(rng.integers(0, 256, 4000))) # the text gets 'harder' towards its end
    status, g, out, err = train_here(repo, capfd, monkeypatch, *TINY, '--pos=nope', '--max_iters=1', '--dataset=t', f'--out_dir={tmp_path}/o')
    def values():
        metrics, scores = g['evaluate_lengths']()
        return [metrics[f'bpb_{T}'] for T in (16, 32, 64, 128)], scores
    with torch.no_grad():
        for block in g['raw_model'].transformer.h:
            block.attn.c_proj.weight.zero_()                               # no attention: a function of the last byte alone
    of_last_byte, _ = values()
    assert max(of_last_byte) - min(of_last_byte) < 1e-5 and of_last_byte[0] > 0

    class Constant(torch.nn.Module): # always the same distribution, whatever it read
        logits = torch.linspace(-2, 2, 256)
        def forward(self, x):
            return self.logits.expand(*x.shape[:-1], -1)
    g['raw_model'].lm_head = Constant()
    constant, scores = values()
    assert max(constant) - min(constant) < 1e-6
    # and it is the mean of its codes for these very bytes: the last 8 of windows spread over the text
    tokens, bits = np.fromfile(os.path.join(repo, 'data/t/val.bin'), np.uint8), -torch.log_softmax(Constant.logits, 0).numpy() / np.log(2)
    ends = np.linspace(129, len(tokens), len(scores['bpb_16'])).astype(int)
    assert constant[0] == pytest.approx(np.mean([bits[tokens[e - 8:e]].mean() for e in ends]), abs=1e-5)

# -----------------------------------------------------------------------------
# ablate.py

def test_ablate_runs_skips_and_reports(repo, tmp_path, capfd, monkeypatch):
    flags = ['config/smoke.py', *TINY, '--pos=rope,damped:pos_c=1', '--seeds=0,1', '--max_iters=2', '--plot=False']
    first = run(repo, 'ablate.py', *flags, cwd=tmp_path, timeout=300)
    summary = json.loads(first.splitlines()[-1])['encodings']
    assert set(summary) == {'rope', 'damped c=1'} and summary['damped c=1']['n'] == 2
    assert summary['damped c=1']['acc_16_vs_base']['verdict'] in ('better', 'worse', 'noise')
    text = (tmp_path / 'out-ablate' / 'results.csv').read_text()
    assert json.loads(run(repo, 'ablate.py', *flags, cwd=tmp_path, timeout=300).splitlines()[-1])['encodings'] == summary
    assert (tmp_path / 'out-ablate' / 'results.csv').read_text() == text # nothing ran twice

    monkeypatch.chdir(tmp_path)
    ablate = lambda *flags: train_here(repo, capfd, monkeypatch, *flags, script='ablate.py')
    def refused(*flags, words, code=2):
        status, _, _, err = ablate(*flags)
        assert_refused(status, err, *words, code=code)
    def report(name, *flags):
        status, _, out, err = ablate(f'--report={name}', '--plot=False', *flags)
        assert status == 0, err
        return out, json.loads(out.splitlines()[-1])['encodings']
    def write(name, rows):
        with open(tmp_path / name, 'w', newline='') as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return name
    out, of = report('out-ablate/results.csv', '--markdown=True', '--baseline=damped c=1')
    assert '| rope | ' in out and of['rope']['acc_128_vs_base']['verdict']
    out, of = report('out-ablate/results.csv', '--pos=damped c=1')
    assert of == {'damped c=1': summary['damped c=1']} # compared with rope, though that is not shown
    refused('config/smoke.py', words=['--pos'])
    refused('config/smoke.py', '--pos=rope', '--seed=1', words=['--seeds'])
    refused('--report=out-ablate', '--baseline=ropee', words=['ropee', 'damped c=1']) # a folder's results.csv
    first = run(repo, 'ablate.py', *flags, '--baseline=rope_hi', cwd=tmp_path, timeout=300) # after runs that is a note
    assert "no rows of the baseline 'rope_hi'" in first and set(json.loads(first.splitlines()[-1])['encodings']) == set(summary)
    refused('--report=none.csv', words=['none.csv'], code=1)
    refused('--report=out-ablate/results.csv', '--basline=x', words=['--basline'])
    refused('--report=out-ablate/results.csv', '--pos=damped:pos_c=1', words=['damped:pos_c=1', 'damped c=1'])
    (tmp_path / 'mixed.csv').write_text(text + text.splitlines(keepends=True)[-1].replace('acc_', 'bpb_')) # a run on text in the same file is another study
    refused('--report=mixed.csv', words=['mixed.csv', 'acc_16', 'bpb_16'], code=1)
    rows = list(csv.DictReader(text.splitlines()))
    wider = [r | {'n_layer': '9', 'params': str(int(r['params']) + 99)} for r in rows if r['pos'] == 'damped'] # another run: its own baseline is not there
    out, of = report(write('layers.csv', rows + wider))
    ours, other = (of[f'damped c=1 n_layer={n}'] for n in (rows[0]['n_layer'], 9))
    assert 'acc_16_vs_base' in ours and 'acc_16_vs_base' not in other and other['acc_16'] == ours['acc_16'] and 'n_layer=9' in out.splitlines()[0]
    assert 'params' in list(report(write('wide.csv', rows + [r | {'n_layer': rows[0]['n_layer']} for r in wider]))[1])[0] # a width has no column
    assert len(report(write('hash.csv', rows + [r | {'config_hash': 'other'} for r in rows]))[1]) == 4 # settings without a column are not merged
    notes = [r | {'note': note} for note in ('1.2.3', '.') for r in rows]
    assert len(report(write('notes.csv', notes))[1]) == 4
    assert 'rope 0.5' in report(write('rates.csv', [r | {'learning_rate': '0.5'} if r['pos'] == 'rope' else r for r in rows]))[0] # a tuned rate is in no label
    tuned = [r | {'n_layer': n, 'learning_rate': rate} for n, rate in (('1', '0.5'), ('2', '0.1')) for r in rows] # a rate each, and no variants
    assert 'acc_16_vs_base' in report(write('tuned.csv', tuned))[1]['damped c=1 n_layer=2']
    refused('config/smoke.py', '--pos=rope:learning_rate=1', '--learning_rate=1,2', words=['rope:learning_rate=1', 'of its own'])
    refused('config/smoke.py', '--pos=rope', '--learning_rate=1,2', '--seeds=0,1000', words=['tune_seeds', '1000'])
    refused('--report=' + write('nan.csv', [r | {'metrics': r['metrics'].replace('"acc_16": ', '"acc_16": NaN, "x": ')} for r in rows]), words=['nan', 'damaged'], code=1)
    refused('--report=' + write('blank.csv', [r | {'pos': ' '} for r in rows]), words=['blank', 'pos'], code=1)
    refused('--report=' + write('empty.csv', [r | {'block_size': ''} for r in rows]), words=['empty', 'block_size'], code=1)
    refused('--report=' + write('bare.csv', [r | {'metrics': '{"acc_16": 0.5}'} for r in rows]), words=['bare', 'damaged'], code=1)

def test_ablate_tunes_the_learning_rate_on_seeds_that_it_does_not_report(repo, tmp_path):
    """1e-9 learns nothing, so the other wins; the report says which."""
    out = run(repo, 'ablate.py', 'config/smoke.py', *TINY, '--pos=rope', '--seeds=0', '--learning_rate=1e-9,1e-2', '--max_iters=30', '--plot=False',
              '--jobs=2', '--results=r.csv', cwd=tmp_path, timeout=300)
    assert 'rope: learning rate 0.01 of 1e-09 (' in out and json.loads(out.splitlines()[-1])['encodings']['rope']['seeds'] == [0]
    read = lambda name: {(r['seed'], float(r['learning_rate'])) for r in csv.DictReader(open(tmp_path / name))}
    assert read('r_tune.csv') == {('1000', 1e-9), ('1000', 1e-2)} and read('r.csv') == {('0', 1e-2)}
