"""
What train.py computes: the same command gives the same numbers, in one piece or several, on one process
or two, for every task, somebody's own included.
"""

import json
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

import runs
import tasks
from conftest import ALL, TINY, assert_refused, finish, start, stream

def logged(out_dir='out'):
    """{iteration: loss}, {iteration: validation loss} of a run."""
    with open(os.path.join(out_dir, 'log.jsonl')) as f:
        lines = [json.loads(line) for line in f]
    return tuple({r['iter']: r[key] for r in lines if key in r} for key in ('loss', 'val_loss'))

def weights(out_dir='out'):
    return runs.load(os.path.join(out_dir, 'ckpt.pt'))['model']

def assert_equal(a, b, atol=0):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.allclose(a[key], b[key], rtol=0, atol=atol), key

def ok(run):
    assert run.status == 0, run.err
    return run

def row_of(run):
    return json.loads(ok(run).out.splitlines()[-1])

def stop_at(monkeypatch, it):
    """The run gets a SIGTERM in this iteration."""
    batch = tasks.KernelTask.batch
    def and_stop(self, seed, number, n):
        if number == it:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, seed, number, n)
    monkeypatch.setattr(tasks.KernelTask, 'batch', and_stop)

# -----------------------------------------------------------------------------
# same command, same numbers

@pytest.mark.parametrize('flags', ['', '--log_interval=3', '--eval_interval=1', '--out_dir=elsewhere',
                                   '--save_best=False'])
def test_what_decides_nothing_changes_no_number(here, flags):
    numbers = []
    for more in ([], flags.split()):
        row = row_of(here('train.py', *TINY, '--pos=jordan_scaled', '--max_iters=5', '--dropout=.1',
                          '--json=True', *more))
        numbers.append((row['val_loss'], row['metrics']))
    assert numbers[0] == numbers[1]

@pytest.mark.slow
def test_smoke_has_one_val_loss(here, folders, repo, tmp_path):
    """In a fresh copy, after a longer run, after another teacher, after prepare.py, beside another run."""
    smoke = 'config/smoke.py --seed=0 --max_iters=5 --eval_iters=64 --eval_lens=64 --json=True'.split()
    def val_loss(*flags):
        return row_of(here('train.py', *smoke, *flags))['val_loss']
    fresh = finish(start('train.py', *smoke, repo=repo, cwd=tmp_path))[0]
    losses = [json.loads(fresh.splitlines()[-1])['val_loss']]
    val_loss('--max_iters=100')
    losses += [val_loss()]
    assert val_loss('--kernel=linear') != losses[0] and val_loss('--seed=1') != losses[0]
    ok(here('data/synth/prepare.py', '--block_size=64', '--train_rows=100'))
    losses += [val_loss()]
    beside = start('train.py', *smoke, '--max_iters=100000', '--out_dir=beside', '--seed=1', cwd=tmp_path)
    while not beside.stdout.readline().startswith('iter '):
        assert beside.poll() is None
    losses += [val_loss('--log_interval=2', '--eval_interval=2', '--out_dir=another')]
    assert beside.poll() is None and len(set(losses)) == 1
    beside.kill()
    beside.communicate()

def test_batches_are_the_same_for_every_encoding_and_other_for_another_seed(here, monkeypatch):
    seen, batch = [], tasks.KernelTask.batch
    def note(self, *args):
        seen.append(batch(self, *args)[0])
        return seen[-1], batch(self, *args)[1]
    monkeypatch.setattr(tasks.KernelTask, 'batch', note)
    for flags in (['--pos=rope'], ['--pos=damped'], ['--seed=1']):
        ok(here('train.py', *TINY, *flags))
    rope, damped, other = (torch.cat(seen[n:n + 2]) for n in (0, 2, 4))
    assert torch.equal(rope, damped) and not torch.equal(rope, other)

@pytest.mark.parametrize('dataset', ['synth', 't'])
def test_four_times_six_rows_are_one_times_twentyfour(here, folders, dataset):
    stream()
    flags = [*TINY, f'--dataset={dataset}', '--max_iters=3', '--eval_lens=16']
    ok(here('train.py', *flags, '--batch_size=24', '--out_dir=one'))
    ok(here('train.py', *flags, '--batch_size=6', '--gradient_accumulation_steps=4', '--out_dir=four'))
    assert_equal(weights('one'), weights('four'), atol=1e-5)

def test_the_loss_is_the_mean_over_asked_targets(here, monkeypatch):
    """Rows that ask for less count less: micro-batches with blanked targets equal one batch."""
    batch = tasks.RecallTask.batch
    def blank(self, seed, it, n):
        x, y = batch(self, seed, it, n)
        y[:len(y) // 2, 2:] = -1
        return x, y
    monkeypatch.setattr(tasks.RecallTask, 'batch', blank)
    flags = [*TINY, '--dataset=recall', '--block_size=32', '--max_iters=3', '--eval_lens=32']
    ok(here('train.py', *flags, '--batch_size=8', '--out_dir=one'))
    ok(here('train.py', *flags, '--batch_size=2', '--gradient_accumulation_steps=4', '--out_dir=four'))
    assert_equal(weights('one'), weights('four'), atol=1e-5)

@pytest.mark.slow
@pytest.mark.parametrize('dataset', ['synth', 'recall', 't'])
def test_two_processes_equal_one(here, repo, tmp_path, folders, dataset):
    """torchrun with 2 gloo processes: the same global batch, losses and weights to 1e-5, and one row."""
    stream()
    (repo / 'data' / 't').symlink_to(folders / 't')
    flags = [*TINY, f'--dataset={dataset}', '--block_size=32', '--max_iters=3',
             '--gradient_accumulation_steps=2',
             '--dropout=0.1', '--eval_interval=2', '--eval_lens=32,64']
    ok(here('train.py', *flags, '--out_dir=one'))
    torchrun = ['torch.distributed.run', '--standalone', '--nproc_per_node=2', repo / 'train.py']
    finish(start('-m', *torchrun, *flags, '--out_dir=two', repo='', cwd=tmp_path))
    assert_equal(weights(tmp_path / 'one'), weights(tmp_path / 'two'), atol=1e-5)
    one, two = logged(tmp_path / 'one')[1], logged(tmp_path / 'two')[1]
    assert list(one) == [0, 2, 3] and list(one.values()) == pytest.approx(list(two.values()), abs=1e-5)
    first, second = runs.read_rows(str(tmp_path / 'results.csv'))
    assert first['config_hash'] == second['config_hash']
    for T in ('32', '64'):
        assert np.allclose(json.loads(first['metrics'])[T], json.loads(second['metrics'])[T], atol=1e-4)

# -----------------------------------------------------------------------------
# resume

@pytest.mark.parametrize('pos', ['rope', 'jordan_scaled'])
@pytest.mark.parametrize('at', [0, 2, 3])
def test_a_resumed_run_is_bit_for_bit_the_straight_one(here, monkeypatch, pos, at):
    """Every loss and weight, with dropout and accumulation, stopped on an evaluation and between two."""
    flags = [*TINY, f'--pos={pos}', '--dropout=0.2', '--gradient_accumulation_steps=2', '--eval_interval=3',
             '--max_iters=6']
    straight = row_of(here('train.py', *flags, '--json=True', '--out_dir=straight'))
    with monkeypatch.context() as m:
        stop_at(m, at)
        assert here('train.py', *flags, '--out_dir=parts').status == 128 + signal.SIGTERM
    parts = row_of(here('train.py', *flags, '--json=True', '--out_dir=parts', '--init_from=resume'))
    assert logged('straight') == logged('parts')
    assert_equal(weights('straight'), weights('parts'))
    same = 'config_hash run_hash iters val_loss metrics label'.split()
    assert [straight[k] for k in same] == [parts[k] for k in same]

def test_a_finished_run_that_is_resumed_adds_no_row(here):
    ok(here('train.py', *TINY))
    ok(here('train.py', *TINY, '--init_from=resume'))
    assert len(runs.read_rows('results.csv')) == 1

def test_a_row_that_is_lost_comes_back_by_resume(here):
    """As after a kill during the measurement."""
    row = row_of(here('train.py', *TINY, '--json=True'))
    os.remove('results.csv')
    ok(here('train.py', *TINY, '--init_from=resume'))
    (again,) = runs.read_rows('results.csv')
    assert json.loads(again['metrics']) == row['metrics'] and again['config_hash'] == row['config_hash']

@pytest.mark.slow
def test_killed_at_any_instant_it_resumes(tmp_path):
    """SIGKILL at random instants while every iteration saves; tests/kill.py does it 50 times."""
    rng, reached = random.Random(0), 0
    for kill in range(3):
        more = ['--init_from=resume'] if kill else []
        p = start('train.py', *TINY, '--max_iters=100000', '--eval_interval=1', '--eval_iters=1', *more,
                  cwd=tmp_path)
        # until it has gone on from where it was
        for line in p.stdout:
            if line.startswith('iter ') and int(line.split()[1].strip(':')) > reached + 1:
                break
        time.sleep(rng.uniform(0, 0.3))
        p.kill()
        assert p.communicate()[1] == ''
        before, reached = reached, runs.load(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num']
        assert reached > before

def test_best_is_the_best_whatever_comes_after(here, monkeypatch):
    """Under a learning rate that makes the validation loss jump, and across a resume."""
    flags = [*TINY, '--eval_interval=1', '--learning_rate=0.3', '--decay_lr=False', '--warmup_iters=0',
             '--max_iters=12']
    with monkeypatch.context() as m:
        stop_at(m, 6)
        here('train.py', *flags)
    ok(here('train.py', *flags, '--init_from=resume'))
    _, val = logged()
    del val[0] # an untrained model is none
    ckpt, best = (runs.load(f'out/{name}.pt') for name in ('ckpt', 'best'))
    lowest = min(val, key=val.get)
    assert lowest < 12 and max(val.values()) > 1.05 * val[lowest], 'one that only falls proves nothing'
    assert best['iter_num'] == lowest and ckpt['iter_num'] == 12
    assert best['best_val_loss'] == ckpt['best_val_loss'] == pytest.approx(val[lowest], abs=1e-6)

# -----------------------------------------------------------------------------
# schedule, evaluation

@pytest.mark.parametrize('warmup, decay', [(0, 0), (0, 20), (0, 30), (5, 5), (5, 20), (20, 20)])
def test_learning_rate_warms_up_and_decays_to_its_minimum(here, warmup, decay):
    """The iterations are none here: the schedule alone."""
    run = ok(here('train.py', *TINY, '--max_iters=0', f'--warmup_iters={warmup}', f'--lr_decay_iters={decay}',
                  '--learning_rate=1', '--min_lr=0.1', '--eval_lens=16'))
    rates = [run.names['get_lr'](it) for it in range(40)]
    assert all(0 < r <= 1 for r in rates) and rates[-1] == 0.1
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup < decay:
        assert rates[warmup] == 1

def test_the_last_lines_are_the_table_and_what_comes_next(here, tmp_path):
    """A row for each length, a value within its interval; nothing but out_dir and results.csv appears."""
    run = ok(here('train.py', *TINY, '--pos=jordan_scaled+alibi', '--pos_c=0.5'))
    assert run.out.splitlines()[-1].startswith('next: ')
    (row,) = runs.read_rows('results.csv')
    assert row['label'] == 'jordan_scaled+alibi c=0.5' and row['pos_c'] == '0.5' and row['metric'] == 'acc'
    metrics = json.loads(row['metrics'])
    assert list(metrics) == ['16', '32', '64', '128']
    for value, lo, hi, n in metrics.values():
        assert 0 <= lo <= value <= hi <= 1 and n == 16
    assert sorted(os.listdir(tmp_path)) == ['out', 'results.csv']
    assert str(tmp_path) not in (tmp_path / 'results.csv').read_text()
    assert {'ckpt.pt', 'best.pt', 'log.jsonl', '.lock'} == set(os.listdir('out'))

@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_file(repo, tmp_path, folders):
    """A training text of 100 MB costs less than 30 MB more than one of 1 MB, by peak resident memory."""
    code = ("import sys, runpy\nsys.argv.pop(0)\n"
            "sys.path.insert(0, sys.argv[0].rpartition('/')[0])\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "print([line.split()[1] for line in open('/proc/self/status') if line[:5] == 'VmHWM'][0])")
    (tmp_path / 'peak.py').write_text(code)
    peaks = []
    for size in (10**6, 10**8):
        stream('big', train=size)
        if not (repo / 'data' / 'big').exists():
            (repo / 'data' / 'big').symlink_to(folders / 'big')
        p = start(tmp_path / 'peak.py', repo / 'train.py', *TINY, '--dataset=big', '--max_iters=20', repo='',
                  cwd=tmp_path)
        peaks.append(int(finish(p)[0].splitlines()[-1]))
    assert peaks[1] < peaks[0] + 30 * 1024

# -----------------------------------------------------------------------------
# somebody's own data and tasks

def test_rows_of_a_vocabulary_of_eight_are_scored_over_all_of_it(here, folders):
    """As somebody's own prepare.py makes them: they train, and the accuracy equals a count by hand."""
    from data.folder import write_folder
    rng = np.random.default_rng(0)
    def rows(T, n):
        row = rng.integers(0, 8, (n, T + 1), dtype=np.uint8)
        row[:, -1] = (row[:, -2] + row[:, -3]) % 8
        return row
    files = {'train': rows(16, 500), 'val': rows(16, 40), 'test_16': rows(16, 40), 'test_32': rows(32, 40)}
    write_folder('eight', {split: [r] for split, r in files.items()},
                 dict(kind='rows', vocab_size=8, answers=8, asked=1, dtype='uint8', lengths=[16, 32]))
    row = row_of(here('train.py', *TINY, '--dataset=eight', '--max_iters=30', '--eval_rows=100',
                      '--json=True'))
    assert set(row['metrics']) == {'16', '32'} and row['dataset'] == 'eight' and row['data_checksum']
    model = runs.model_of(runs.load('out/ckpt.pt'), 'out/ckpt.pt').eval()
    for T in (16, 32):
        test = torch.from_numpy(files[f'test_{T}'].astype(np.int64))
        with torch.no_grad():
            right = model(test[:, :-1])[0][:, -1].argmax(dim=-1) == test[:, -1]
        assert row['metrics'][str(T)][0] == pytest.approx(right.double().mean().item(), abs=1e-6)
    assert 'accuracy' in ok(here('sample.py', '--num_samples=3')).out

# a vocabulary of its own, three asked positions of four, a metric of its own
OWN_TASK = '''

METRICS['cost'] = ('mean error', -1, .05)

class CountTask(Task):
    """Five digits, blanks, then their running sums modulo 7; the second sum is not asked."""
    vocab_size, answers, metric, note, shortest = 9, 7, 'cost', 'sums of five', 12

    def rows(self, rng, T, n):
        x = np.full((n, T), 7)
        x[:, :5], x[:, -4:] = rng.integers(0, 7, (n, 5)), 8
        y = x[:, :5].cumsum(axis=1)[:, 1:] % 7
        y[:, 1] = -1
        return torch.from_numpy(x), torch.from_numpy(y)

    def values(self, nats, hits, y):
        return 2.0 - ratio(hits.sum(axis=1), (y >= 0).sum(axis=1))

TASKS['count'] = CountTask
'''

@pytest.mark.slow
def test_a_task_of_ones_own_runs_everywhere_with_no_other_edit(repo, tmp_path):
    with open(repo / 'tasks.py', 'a') as f:
        f.write(OWN_TASK)
    flags = [f for f in TINY if 'pos' not in f] + ['--dataset=count']
    def run(script, *flags):
        return finish(start(script, *flags, repo=repo, cwd=tmp_path))[0]
    # the grid starts train.py
    report = run('ablate.py', 'config/smoke.py', *flags, '--pos=rope,damped', '--seeds=0', '--plot=False')
    assert 'mean error: mean over n seeds' in report and 'rope' in report and 'damped' in report
    _, row = runs.read_rows(str(tmp_path / 'out-ablate' / 'results.csv'))
    assert row['metric'] == 'cost' and row['note'] == 'sums of five'
    for value, lo, hi, n in json.loads(row['metrics']).values():
        assert 1 <= lo <= value <= hi <= 2
    trained = 'out-ablate/damped_s0'
    assert 'mean error' in run('sample.py', f'--out_dir={trained}', '--num_samples=3')
    assert 'damped' in run('probe.py', f'--ckpt={trained}/ckpt.pt')

# -----------------------------------------------------------------------------
# any configuration

@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2))
def test_any_configuration_runs_or_is_refused_in_one_line(here, seed):
    """Random sizes, encodings, orders, dampings, shears, dtypes: trained, resumed, measured, or one line."""
    rng, ran = random.Random(seed), 0
    for n in range(8):
        heads = rng.choice([1, 2, 3])
        settings = dict(block_size=rng.choice([2, 7, 16, 33]), n_layer=rng.choice([1, 2]), n_head=heads,
                        n_embd=heads * rng.choice([2, 6, 8, 12, 24]), mlp_ratio=rng.choice([1, 4]),
                        dropout=rng.choice([0, .3]), bias=rng.random() < .5, pos=rng.choice(ALL),
                        pos_theta=rng.choice([1.5, 1e4]), pos_grid=rng.choice(['fast', 'full']),
                        pos_order=rng.choice([2, 2, 3, 4]), pos_eta0=rng.choice([0, .5, -3]),
                        pos_c=rng.choice([None, .1, 50]), dtype=rng.choice(['float32', 'bfloat16']),
                        attn_temperature=rng.choice([1, 1, 2.0]), seed=n, out_dir=f'o{n}')
        flags = [*TINY, *(f'--{k}={v}' for k, v in settings.items())]
        run = here('train.py', *flags)
        if run.status:
            assert_refused(run.status, run.err)
            continue
        ran += 1
        ok(here('train.py', *flags, '--init_from=resume'))
        assert np.isfinite(list(logged(f'o{n}')[0].values())).all(), settings
    assert ran >= 3
