"""
Every run ends well, or says in one line why not: a test for each kind of fault, of the whole kind.
"""

import csv
import errno
import io
import json
import os
import random
import signal
import sys
import time

import pytest
import torch

import common
import configurator
import runs
import tasks
from conftest import ROOT, TINY, assert_refused, finish, start, stream

def row_of(run):
    """The row that a run printed with --json=True."""
    assert run.status == 0, run.err
    return json.loads(run.out.splitlines()[-1])

def rows_of(path):
    with open(path, newline='', encoding='utf-8') as f:
        return list(csv.DictReader(f))

def send(monkeypatch, number, at, name='batch'):
    """The process gets this signal when its task is asked for `name` for the at-th time."""
    calls, asked = [], getattr(tasks.Task, name)
    def count(*args):
        calls.append(args)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return asked(*args)
    monkeypatch.setattr(tasks.Task, name, count)

# -----------------------------------------------------------------------------
# 1 identity

@pytest.mark.parametrize('flag', ['--lengths=8,16', '--omega=0.2', '--kernel=phase', '--block_size=8',
                                  '--eval_rows=15', '--eval_iters=15', '--dtype=bfloat16', '--mlp_ratio=2',
                                  '--grad_clip=2'])
def test_what_changes_a_number_changes_the_hash(here, flag):
    first, other = (row_of(here('train.py', *TINY, '--max_iters=0', '--json=True', *more))
                    for more in ((), (flag,)))
    assert first['config_hash'] != other['config_hash']

@pytest.mark.parametrize('flags', ['--log_interval=7 --eval_interval=1', '--save_best=False --label=x',
                                   '--batch_size=2 --gradient_accumulation_steps=2'])
def test_what_changes_no_number_leaves_the_hash(here, flags):
    first, other = (row_of(here('train.py', *TINY, '--max_iters=0', '--json=True', *more))
                    for more in ((), flags.split()))
    assert first['config_hash'] == other['config_hash'] and first['run_hash'] == other['run_hash']

def test_the_data_checksum_is_of_every_split(here, folders):
    """With another test text a run is another run, which skip_done does not skip."""
    flags = [*TINY, '--dataset=t', '--eval_lens=16', '--skip_done=True', '--json=True']
    stream()
    first = row_of(here('train.py', *flags))
    assert 'already' in here('train.py', *flags).out
    stream(seed=1)
    again = here('train.py', *flags)
    assert 'already' not in again.out and row_of(again)['data_checksum'] != first['data_checksum']

@pytest.mark.parametrize('split', ['train', 'val', 'test'])
@pytest.mark.parametrize('damage', ['missing', 'cut', 'exchanged'])
def test_a_split_that_is_not_what_meta_says_is_one_line(here, folders, split, damage):
    stream()
    file = folders / 't' / f'{split}.bin'
    if damage == 'missing':
        file.unlink()
    if damage == 'cut':
        file.write_bytes(file.read_bytes()[:1500])
    if damage == 'exchanged':
        file.write_bytes(file.read_bytes()[::-1])
    run = here('train.py', *TINY, '--dataset=t')
    assert_refused(run.status, run.err, f't/{split}.bin', code=1)

# -----------------------------------------------------------------------------
# 2 schedules and resume

@pytest.mark.parametrize('flags, words', [
    ('--min_lr=1', ['min_lr=1', 'learning_rate=0.001']),
    ('--warmup_iters=3', ['warmup_iters=3', 'max_iters=2']),
    ('--warmup_iters=2 --lr_decay_iters=1', ['warmup_iters=2', 'lr_decay_iters=1']),
    ('--extend=True', ['extend', '--init_from=resume'])])
def test_a_schedule_that_is_none_is_refused(here, flags, words):
    run = here('train.py', *TINY, *flags.split())
    assert_refused(run.status, run.err, *words)

@pytest.mark.parametrize('flag', ['--max_iters=4', '--max_iters=1', '--dtype=bfloat16', '--block_size=8',
                                  '--seed=1', '--learning_rate=0.5', '--omega=0.3', '--eval_iters=8',
                                  '--pos=nope', '--grad_clip=0', '--batch_size=8', '--warmup_iters=1',
                                  '--pos_theta=500', '--dropout=0.1'])
def test_what_decides_the_rest_of_a_run_is_refused_on_resume_by_name(here, flag):
    assert here('train.py', *TINY).status == 0
    run = here('train.py', *TINY, '--init_from=resume', flag)
    assert_refused(run.status, run.err, f"{flag[2:].partition('=')[0]} is ", 'ckpt.pt')

def test_other_data_are_refused_on_resume(here, folders):
    stream()
    assert here('train.py', *TINY, '--dataset=t', '--eval_lens=16').status == 0
    stream(val=2999)
    run = here('train.py', *TINY, '--dataset=t', '--eval_lens=16', '--init_from=resume')
    assert_refused(run.status, run.err, 'data is')

@pytest.mark.parametrize('flags', ['--eval_rows=8 --eval_lens=16', '--eval_interval=1 --label=x',
                                   '--results=other.csv', '--batch_size=2 --gradient_accumulation_steps=2'])
def test_what_changes_nothing_is_free_on_resume(here, flags):
    assert here('train.py', *TINY).status == 0
    assert here('train.py', *TINY, '--init_from=resume', *flags.split()).status == 0

def test_an_extended_run_has_a_hash_of_its_own(here):
    """Neither that of a straight run, nor that of one extended elsewhere; the same command goes on."""
    straight = row_of(here('train.py', *TINY, '--max_iters=4', '--json=True', '--out_dir=s'))
    hashes = {straight['config_hash']}
    for n in (1, 2):
        assert here('train.py', *TINY, f'--max_iters={n}', f'--out_dir={n}').status == 0
        flags = [*TINY, '--max_iters=4', '--json=True', f'--out_dir={n}', '--init_from=resume',
                 '--extend=True']
        extended = row_of(here('train.py', *flags))
        assert extended['iters'] == 4
        assert row_of(here('train.py', *flags))['config_hash'] == extended['config_hash']
        hashes.add(extended['config_hash'])
    assert len(hashes) == 3

def test_what_differs_from_an_extended_run_is_named_before_extend(here):
    assert here('train.py', *TINY).status == 0
    assert here('train.py', *TINY, '--init_from=resume', '--extend=True', '--max_iters=3').status == 0
    run = here('train.py', *TINY, '--init_from=resume', '--max_iters=3', '--pos=nope')
    assert_refused(run.status, run.err, "pos is ", "'nope' now")
    run = here('train.py', *TINY, '--init_from=resume', '--max_iters=3')
    assert_refused(run.status, run.err, 'extend is True', 'it is an extended run')

def test_a_folder_is_no_checkpoint(here):
    os.makedirs('folder')
    run = here('probe.py', '--ckpt=folder')
    assert_refused(run.status, run.err, 'is a folder', os.path.join('folder', 'ckpt.pt'), code=1)

def test_fewer_iterations_than_the_checkpoint_has_are_refused(here):
    assert here('train.py', *TINY).status == 0
    run = here('train.py', *TINY, '--init_from=resume', '--extend=True', '--max_iters=1')
    assert_refused(run.status, run.err, 'has 2 iterations', 'max_iters=1')

# -----------------------------------------------------------------------------
# 3 two at once

def test_a_second_run_in_one_out_dir_is_refused(here, tmp_path):
    lock = runs.open_out_dir(str(tmp_path / 'o'), False, print)
    run = here('train.py', *TINY, '--out_dir=o')
    assert_refused(run.status, run.err, 'o', 'another run', '--out_dir', code=1)
    lock.close()
    assert here('train.py', *TINY, '--out_dir=o').status == 0

@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_where_there_are_no_locks_it_goes_on_without(here, monkeypatch, number):
    import fcntl
    def none(*args):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, 'flock', none)
    assert here('train.py', *TINY).status == 0 and len(rows_of('results.csv')) == 1

def test_what_a_killed_run_was_writing_is_cleared_and_nothing_else(tmp_path):
    for name in ('ckpt.pt.12.tmp', 'log.jsonl.3.tmp', 'mine.tmp', 'ckpt.pt.bak'):
        (tmp_path / name).write_text('')
    runs.open_out_dir(str(tmp_path), False, print).close()
    assert sorted(os.listdir(tmp_path)) == ['.lock', 'ckpt.pt.bak', 'mine.tmp']

@pytest.mark.slow
def test_rows_of_runs_that_end_at_once_do_not_mix(tmp_path):
    code = ('import os, sys; sys.path.insert(0, sys.argv[1])\nimport runs\n'
            'row = dict.fromkeys(runs.COLUMNS, "x" * 50) | dict(format=runs.FORMAT)\n'
            'k = 2 * (os.fork() > 0) + (os.fork() > 0)\n' # four processes
            'row |= dict(label=k, val_loss=1)\n'
            'for n in range(100): runs.append("r.csv", row | dict(seed=n, metrics={"16": [0.5, 0.4]}))')
    (tmp_path / 'write.py').write_text(code)
    finish(start(tmp_path / 'write.py', ROOT, cwd=tmp_path))
    read = runs.read_rows(str(tmp_path / 'r.csv'))
    expected = [(str(k), n) for k in range(4) for n in range(100)]
    assert sorted((r['label'], int(r['seed'])) for r in read) == expected

# -----------------------------------------------------------------------------
# 4 signals and closed pipes

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_while_training_saves_and_ends_with_the_usual_status(here, monkeypatch, number):
    send(monkeypatch, number, at=2)
    run = here('train.py', *TINY, '--max_iters=5')
    assert run.status == 128 + number and '--init_from=resume goes on' in run.out and not run.err
    assert runs.load('out/ckpt.pt')['iter_num'] == 2 and not os.path.exists('results.csv')

@pytest.mark.slow
@pytest.mark.parametrize('number, flags, line', [
    (signal.SIGINT, '--max_iters=1000000 --eval_iters=1000000', 'synth: '), # in its first evaluation
    (signal.SIGHUP, '--max_iters=1 --eval_rows=1000000', '     T'),
    (signal.SIGTERM, '--eval_only=True --eval_rows=1000000', '     T')])
def test_a_signal_ends_a_measurement_at_once_a_second_one_anything(tmp_path, number, flags, line):
    p = start('train.py', *TINY, *flags.split(), cwd=tmp_path)
    while not p.stdout.readline().startswith(line):
        assert p.poll() is None
    time.sleep(0.3)
    p.send_signal(number)
    if line == 'synth: ':
        time.sleep(0.3)
        p.send_signal(number)
    out, err = finish(p, 128 + number, timeout=20)
    assert_refused(p.returncode, err, 'stopped', code=128 + number)

@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    p = start('train.py', *TINY, '--max_iters=30', cwd=tmp_path, before=['nohup'])
    while not p.stdout.readline().startswith('iter 2'):
        assert p.poll() is None
    p.send_signal(signal.SIGHUP)
    finish(p)
    assert rows_of(tmp_path / 'results.csv')[0]['iters'] == '30'

@pytest.mark.slow
@pytest.mark.parametrize('lines', [1, 8])
def test_a_reader_that_goes_away_is_a_wish_to_stop(tmp_path, lines):
    p = start('train.py', *TINY, '--max_iters=100000', cwd=tmp_path)
    for _ in range(lines):
        p.stdout.readline()
    p.stdout.close()
    assert p.wait(timeout=60) == 141 and p.stderr.read() == ''
    assert runs.load(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] >= 1

@pytest.mark.slow
def test_other_scripts_with_a_reader_that_goes_away(here, tmp_path):
    assert here('train.py', *TINY).status == 0
    p = start('sample.py', '--num_samples=2000', cwd=tmp_path)
    p.stdout.readline()
    p.stdout.close()
    assert p.wait(timeout=60) == 141 and p.stderr.read() == ''

@pytest.mark.slow
@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'probe.py', 'bench.py', 'ablate.py',
                                    'data/synth/prepare.py', 'data/text/prepare.py'])
def test_ctrl_c_while_torch_loads_is_one_line(tmp_path, script):
    # a torch that loads for as long as the test needs
    (tmp_path / 'torch.py').write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    p = start(script, 'x', cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert p.stdout.readline() == 'loading\n'
    p.send_signal(signal.SIGINT)
    out, err = finish(p, 130, timeout=30)
    assert_refused(130, err, 'interrupted', code=130)

# -----------------------------------------------------------------------------
# 5 time

@pytest.mark.parametrize('clock', ['set back', 'stands still'])
def test_durations_do_not_come_from_the_wall_clock(here, monkeypatch, clock):
    now = [1e9]
    def tick():
        now[0] -= 3600 if clock == 'set back' else 0
        return now[0]
    monkeypatch.setattr(time, 'time', tick)
    row = row_of(here('train.py', *TINY, '--json=True'))
    assert 0 <= row['train_seconds'] <= row['wall_seconds'] and row['tokens_per_s'] < 1e8

def test_a_run_too_short_for_the_clock_ends_well(here, monkeypatch):
    monkeypatch.setattr(time, 'perf_counter', lambda: 5.0)
    assert row_of(here('train.py', *TINY, '--json=True'))['tokens_per_s'] == 0

# -----------------------------------------------------------------------------
# 6 numbers that stop being numbers

@pytest.mark.parametrize('pos', ['damped', 'jordan_exact', 'jordan_stabilized_abs', 'rope', 'rope+kerple'])
def test_a_run_that_diverges_stops_and_keeps_its_checkpoint(here, pos):
    flags = [*TINY, f'--pos={pos}', '--max_iters=300', '--grad_clip=0', '--eval_interval=1',
             '--warmup_iters=2']
    run = here('train.py', *flags, '--learning_rate=1e30', '--min_lr=0')
    assert_refused(run.status, run.err, 'at iteration', 'smaller learning_rate', code=1)

def test_a_length_that_is_not_finite_is_left_out_with_a_word(here, monkeypatch):
    measure = tasks.score
    def nan_at_64(model, x, *args):
        nats, hits = measure(model, x, *args)
        return nats * (float('nan') if x.size(1) == 64 else 1), hits
    monkeypatch.setattr(tasks, 'score', nan_at_64)
    run = here('train.py', *TINY, '--json=True')
    assert 'T = 64' in run.out and set(row_of(run)['metrics']) == {'16', '32', '128'}

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('script', ['train.py', 'sample.py'])
def test_weights_that_are_not_finite_are_called_so(here, script, value):
    flags = [*TINY, '--pos=damped']
    assert here('train.py', *flags).status == 0
    saved = torch.load('out/ckpt.pt')
    next(v for k, v in saved['model'].items() if 'gamma' in k).fill_(value)
    torch.save(saved, 'out/ckpt.pt')
    run = here(script, *([*flags, '--init_from=resume'] if script == 'train.py' else []))
    assert_refused(run.status, run.err, 'not finite', code=1)

# -----------------------------------------------------------------------------
# 7 streams and encodings

@pytest.mark.slow
@pytest.mark.parametrize('name, env', [
    ('café', dict(PYTHONIOENCODING='cp1252')),
    ('日本', dict(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0', HOME='/nonexistent'))])
def test_a_console_that_cannot_print_ends_no_run(tmp_path, name, env):
    folder = tmp_path / '作業'
    folder.mkdir()
    out, err = finish(start('train.py', *TINY, f'--out_dir={name}', cwd=folder, **env))
    assert not err and len(rows_of(folder / 'results.csv')) == 1
    finish(start('sample.py', f'--out_dir={name}', cwd=folder, **env))

def test_a_label_of_no_unicode_is_no_end_of_a_row(here):
    assert here('train.py', *TINY, '--label=caf\udce9').status == 0
    assert 'caf' in rows_of('results.csv')[0]['label']

@pytest.mark.slow
def test_stdout_that_was_closed_before_the_start(tmp_path):
    p = start(os.path.join(ROOT, 'train.py'), *TINY, cwd=tmp_path, before=['sh', '-c', 'exec "$@" >&-', 'sh'])
    assert finish(p)[1] == '' and len(rows_of(tmp_path / 'results.csv')) == 1

# -----------------------------------------------------------------------------
# 8 errors with their cause

@pytest.mark.parametrize('error, words', [
    (PermissionError(errno.EACCES, 'Permission denied'), 'permission denied'),
    (OSError(errno.EIO, 'Input/output error'), 'input/output error'),
    (MemoryError(), 'not enough memory'),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 'not enough memory')])
@pytest.mark.parametrize('script', ['train.py', 'sample.py'])
def test_a_sound_checkpoint_that_cannot_be_read_is_not_called_damaged(here, monkeypatch, script, error,
                                                                      words):
    os.mkdir('out')
    with open('out/ckpt.pt', 'wb') as f:
        f.write(b'x')
    def broken(*args, **kw):
        raise error
    monkeypatch.setattr(torch, 'load', broken)
    run = here(script, *([*TINY, '--init_from=resume'] if script == 'train.py' else []))
    assert_refused(run.status, run.err, 'out/ckpt.pt', words, 'may be sound', code=1)

def test_a_damaged_checkpoint_is_one_line(here):
    assert here('train.py', *TINY).status == 0
    with open('out/ckpt.pt', 'rb') as f:
        good = f.read()
    n = len(good)
    for damage in (b'', b'none', good[:10], good[:n // 2], good[:-30],
                   good[:2000] + b'\0' * 4000 + good[6000:]):
        with open('out/ckpt.pt', 'wb') as f:
            f.write(damage)
        run = here('train.py', *TINY, '--init_from=resume')
        assert_refused(run.status, run.err, 'out/ckpt.pt', 'damaged', code=1)

@pytest.mark.parametrize('change, words', [
    (lambda c: c.pop('model'), 'not a checkpoint'), (lambda c: c.update(format=1), 'format 1'),
    (lambda c: c['model'].pop('lm_head.weight'), 'lm_head.weight'),
    (lambda c: c.pop('optimizer'), 'optimizer'),
    (lambda c: c['model_args'].update(colour='red'), 'colour'),
    (lambda c: c['optimizer'].clear(), 'optimizer state'),
    (lambda c: c.pop('data'), 'not a checkpoint')])
def test_a_checkpoint_of_something_else_is_one_line(here, change, words):
    assert here('train.py', *TINY).status == 0
    saved = torch.load('out/ckpt.pt')
    change(saved)
    torch.save(saved, 'out/ckpt.pt')
    run = here('train.py', *TINY, '--init_from=resume')
    assert_refused(run.status, run.err, 'out/ckpt.pt', words, code=1)

def test_a_disk_that_is_full_at_a_checkpoint(here, tmp_path):
    """Under a limit of file size that the log keeps and a checkpoint does not; the one before is intact."""
    resource = pytest.importorskip('resource')
    assert here('train.py', *TINY).status == 0
    before = (tmp_path / 'out' / 'ckpt.pt').read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        run = here('train.py', *TINY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(run.status, run.err, 'out/ckpt.pt', 'too large', 'intact', code=1)
    assert (tmp_path / 'out' / 'ckpt.pt').read_bytes() == before
    assert not [name for name in os.listdir(tmp_path / 'out') if name.endswith('.tmp')]

@pytest.mark.parametrize('file', ['log.jsonl', 'ckpt.pt', 'results.csv'])
def test_no_space_left_is_one_line_that_names_the_file(here, monkeypatch, file):
    def full(path, mode='r', *args, **kw):
        if file in str(path) and mode != 'r' and mode != 'rb':
            raise OSError(errno.ENOSPC, 'No space left on device', path)
        return io.open(path, mode, *args, **kw)
    for module in (runs, common):
        monkeypatch.setattr(module, 'open', full, raising=False)
    run = here('train.py', *TINY)
    assert_refused(run.status, run.err, file, 'no space left', code=1)
    if file == 'results.csv': # the row is on stdout
        assert json.loads(run.out.splitlines()[-1])['iters'] == 2

@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full')
@pytest.mark.parametrize('script, flags', [('train.py', TINY), ('sample.py', [])])
def test_a_full_disk_under_stdout(here, tmp_path, script, flags):
    assert here('train.py', *TINY).status == 0
    p = start(script, *flags, cwd=tmp_path, before=['sh', '-c', 'exec "$@" >/dev/full', 'sh'])
    out, err = p.communicate(timeout=60)
    assert_refused(p.returncode, err, 'No space left', code=141 if script == 'train.py' else 1)

def test_an_out_dir_that_cannot_be_is_one_line(here, tmp_path):
    (tmp_path / 'file').write_text('')
    run = here('train.py', *TINY, '--out_dir=file/o', '--results=r.csv')
    assert_refused(run.status, run.err, 'out_dir', 'another --out_dir', code=1)

@pytest.mark.slow
@pytest.mark.parametrize('compiler', ['nonexistent'])
def test_compile_that_fails_falls_back_to_eager_with_one_line(tmp_path, compiler):
    out, _ = finish(start('train.py', *TINY, '--compile=True', cwd=tmp_path, CXX=compiler,
                          TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache')))
    said = [line for line in out.splitlines() if 'torch.compile failed' in line]
    assert len(said) == 1 and 'eager' in said[0] and 'compile=False' in out

def test_wandb_that_is_not_there_is_one_line(here, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    run = here('train.py', *TINY, '--wandb_log=True')
    assert_refused(run.status, run.err, 'wandb', 'pip install')

@pytest.mark.parametrize('env, words', [
    (dict(RANK='0'), 'WORLD_SIZE'), (dict(RANK='a', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_PORT='1'), 'RANK'),
    (dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_PORT='1'), 'MASTER_ADDR'),
    (dict(RANK=''), 'RANK'),
    (dict(RANK='5', WORLD_SIZE='2', LOCAL_RANK='0', MASTER_ADDR='localhost', MASTER_PORT='9'), 'below'),
    (dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='localhost', MASTER_PORT='99999'), 'port')])
def test_half_of_what_torchrun_sets_is_one_line(here, monkeypatch, env, words):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    run = here('train.py', *TINY)
    assert_refused(run.status, run.err, words, 'torchrun')

def test_processes_that_the_machine_has_no_device_for(monkeypatch, capfd):
    for key, value in dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_PORT='1',
                           MASTER_ADDR='x').items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    for device, backend, word in (('cpu', 'nccl', 'gloo'), ('cuda', '', 'nproc_per_node')):
        with pytest.raises(SystemExit) as e:
            common.join_processes(device, backend, 1)
        assert_refused(e.value.code, capfd.readouterr().err, word)

# -----------------------------------------------------------------------------
# 9 found before training

@pytest.mark.parametrize('change, words', [
    (lambda text: b'\xef\xbb\xbf' + text, 'byte order mark'),
    (lambda text: b'a,b\r\n1,2\r\n', 'other columns'),
    (lambda text: text.replace(b',', b';'), 'other columns'),
    (lambda text: text.decode().encode('utf-16'), 'csv'),
    (lambda text: text + b'caf\xe9\r\n', 'csv'), (lambda text: text.replace(b',2,', b',1,', 1), 'format 1')])
def test_a_csv_of_another_kind_is_refused_before_training(here, change, words):
    assert here('train.py', *TINY).status == 0
    with open('results.csv', 'rb') as f:
        text = f.read()
    with open('other.csv', 'wb') as f:
        f.write(change(text))
    run = here('train.py', *TINY, '--results=other.csv', '--out_dir=o')
    assert_refused(run.status, run.err, 'other.csv', words, '--results', code=1)
    assert not run.out and not os.path.exists('o')

def test_an_extension_that_gives_no_more_iterations_is_refused(here):
    assert here('train.py', *TINY).status == 0
    run = here('train.py', *TINY, '--init_from=resume', '--extend=True')
    assert_refused(run.status, run.err, 'extend', 'max_iters=2')

def test_best_pt_is_written_again_where_its_first_save_failed(here, tmp_path):
    assert here('train.py', *TINY).status == 0
    os.remove(tmp_path / 'out' / 'best.pt')
    assert here('train.py', *TINY, '--init_from=resume').status == 0
    assert os.path.exists(tmp_path / 'out' / 'best.pt')

def test_a_blank_label_is_that_of_the_encoding(here, tmp_path):
    assert here('train.py', *TINY, '--label= ').status == 0
    assert runs.read_rows(str(tmp_path / 'results.csv'))[0]['label'] == 'rope'

def test_checkpoints_that_are_written_over_are_said(here):
    assert 'written over' not in here('train.py', *TINY).out
    assert 'written over' in here('train.py', *TINY).out

def test_a_number_too_long_to_print_is_refused(here, tmp_path):
    (tmp_path / 'huge.py').write_text('max_iters = 10**5000')
    run = here('train.py', 'huge.py')
    assert_refused(run.status, run.err, 'max_iters', '30 digits')

@pytest.mark.parametrize('path', ['.', 'file/r.csv', '/dev/full', 'folder/', 'x' * 300])
def test_a_csv_that_cannot_be_is_refused_before_training(here, tmp_path, path):
    (tmp_path / 'file').write_text('')
    run = here('train.py', *TINY, f'--results={path}')
    assert_refused(run.status, run.err, 'results', path[:60])
    assert os.listdir(tmp_path) == ['file']

def test_a_row_that_a_crash_cut_is_left_out_and_the_next_one_is_whole(here):
    assert here('train.py', *TINY).status == 0
    with open('results.csv', 'rb') as f:
        whole = f.read()
    for cut in (3, 30, 100):
        with open('results.csv', 'wb') as f:
            f.write(whole[:-cut])
        run = here('train.py', *TINY, '--seed=1', '--skip_done=True')
        assert run.status == 0 and [r['seed'] for r in runs.read_rows('results.csv')][-1] == '1'

def test_lengths_that_cannot_be_measured_are_refused_before_training(here, folders):
    stream(test=100)
    run = here('train.py', *TINY, '--dataset=t', '--eval_lens=1000,2000')
    assert_refused(run.status, run.err, '1000, 2000', 'test.bin', code=1)
    assert not os.path.exists('out')

@pytest.mark.parametrize('pos, lens, reasons', [
    ('rope', '16,1000', ['test.bin']), ('learned', '16,64', ['pos=learned']),
    ('learned', '16,64,1000', ['test.bin', 'pos=learned']), ('learned', '8,1000', ['test.bin'])])
def test_what_is_left_out_of_the_measurement_has_its_own_reason(here, folders, pos, lens, reasons):
    stream(test=100)
    run = here('train.py', *TINY, '--dataset=t', f'--pos={pos}', f'--eval_lens={lens}', '--max_iters=1')
    note = next(line for line in run.out.splitlines() if 'not measured' in line)
    assert [reason for reason in ('test.bin', 'pos=learned') if reason in note] == reasons

# -----------------------------------------------------------------------------
# 10 distributed: tests/test_train.py has the numbers

@pytest.mark.slow
@pytest.mark.parametrize('flags, words', [('--batch_sise=3', 'batch_sise'), # before the processes meet
                                          ('--out_dir=file/o', 'out_dir')]) # by the first of them alone
def test_a_refusal_is_printed_once(tmp_path, flags, words):
    (tmp_path / 'file').write_text('')
    torchrun = ['torch.distributed.run', '--standalone', '--nproc_per_node=2', os.path.join(ROOT, 'train.py')]
    p = start('-m', *torchrun, *TINY, '--gradient_accumulation_steps=2', '--results=r.csv', flags, repo='',
              cwd=tmp_path)
    out, err = finish(p, 1)
    ours = [line for line in err.splitlines() if line.startswith('train.py: ')]
    assert len(ours) == 1 and words in ours[0] and '[rank' not in err, err[:2000]

def test_processes_with_other_data_are_refused(monkeypatch, capfd):
    def gather(values, mine):
        values[:] = [mine, ('hash', 'other data', 0)]
    monkeypatch.setattr(torch.distributed, 'all_gather_object', gather)
    with pytest.raises(SystemExit) as e:
        common.same_everywhere('settings or data', ('hash', 'data', 0), 2)
    assert_refused(e.value.code, capfd.readouterr().err, 'differ', 'other data', code=1)

# -----------------------------------------------------------------------------
# 11 nothing is ignored in silence

@pytest.mark.parametrize('flags, ignored', [
    ('--pos=rope --pos_order=3 --pos_gamma0=.5 --pos_theta=500', 'pos_order pos_gamma0'),
    ('--pos=rope --pos_grid=full --pos_eta0=.5 --pos_eta_max=3 --pos_lr_mult=3',
     'pos_grid pos_eta0 pos_eta_max pos_lr_mult'),
    ('--pos=nope --pos_theta=3', 'pos_theta'), ('--pos=rope+t5 --pos_lr_mult=2 --pos_theta=99', ''),
    ('--pos=damped --pos_order=3 --n_embd=24 --pos_eta0=.1', 'pos_eta0'),
    ('--pos=jordan_scaled --pos_eta0=8 --pos_eta_max=10 --pos_c=.5 --pos_grid=full', ''),
    ('--pos=jordan_scaled --pos_eta0=0 --pos_eta_max=2', ''), ('--kernel_seed=3', 'kernel_seed'),
    ('--kernel=random --kernel_seed=3', ''), ('--dataset=recall --block_size=32 --omega=.2', 'omega'),
    ('--min_lr=1e-4 --decay_lr=False', 'min_lr'), ('--wandb_project=x', 'wandb_project'),
    ('--backend=gloo', 'backend')])
def test_a_flag_without_effect_says_so(here, flags, ignored):
    run = here('train.py', *TINY, '--dry_run=True', *flags.split())
    assert run.status == 0, run.err
    assert [line.split()[1] for line in run.out.splitlines() if line.startswith('note: ')] == ignored.split()

def test_a_setting_of_a_config_says_nothing(here, tmp_path):
    (tmp_path / 'c.py').write_text("pos = 'rope'\npos_eta0 = .5\n")
    assert 'note: ' not in here('train.py', 'c.py', '--dry_run=True').out

@pytest.mark.parametrize('dataset, flags, ignored', [
    ('synth', '--start=x --temperature=0 --top_k=3 --num_samples=1', 'start temperature top_k'),
    ('t', '--start=x --temperature=0 --top_k=3 --num_samples=1 --max_new_tokens=2', ''),
    ('t', '--score=text --temperature=0', 'temperature')])
def test_a_flag_without_effect_on_a_sample_says_so(here, folders, tmp_path, dataset, flags, ignored):
    stream()
    (tmp_path / 'text').write_text('some text')
    assert here('train.py', *TINY, f'--dataset={dataset}', '--eval_lens=16').status == 0
    run = here('sample.py', *flags.split())
    assert run.status == 0, run.err
    assert [line.split()[1] for line in run.out.splitlines() if line.startswith('note: ')] == ignored.split()

def test_learned_says_that_it_crops_a_prompt(here, folders):
    stream()
    assert here('train.py', *TINY, '--dataset=t', '--pos=learned').status == 0
    run = here('sample.py', f"--start={'a' * 40}", '--max_new_tokens=2', '--num_samples=1')
    assert run.status == 0 and 'the last 16' in run.out

# -----------------------------------------------------------------------------
# flags and configs

@pytest.mark.parametrize('flag, words', [
    ('--batch_sise=3', ['batch_sise', 'did you mean batch_size']), ('--zzz=1', ['zzz', '--help']),
    ('--pos', ['--pos=VALUE']), ('-pos=rope', ['write it as --pos=rope']),
    ('-batch_size=32', ['--batch_size=32']),
    ('--pos=jordan', ['jordan', 'one of']),
    ('--pos=jordan_stabilised', ['did you mean', 'jordan_stabilized']),
    ('--pos=', ['pos']), ('--n_embd=130', ['n_embd=130']), ('--eval_interval=0', ['eval_interval=0']),
    ('--batch_size=-1', ['batch_size']), ('--batch_size=many', ['whole number']),
    ('--batch_size=1.5', ['whole number']),
    ('--learning_rate=nan', ['finite']), ('--learning_rate=1e-3x', ['finite number']),
    ('--dropout=1', ['dropout']),
    ('--save_best=maybe', ['True or False']), ('--pos_eta0=9', ['pos_eta0', 'pos_eta_max']),
    ('--eval_lens=16,x', ['eval_lens']), ('--eval_lens=1', ['eval_lens']),
    ('--device=tpu', ['device', 'cpu']),
    ('--dtype=float8', ['dtype', 'bfloat16']), ('--init_from=gpt2', ['init_from', 'scratch', 'resume']),
    ('config/none.py', ['no such config file']), ('config/smok.py', ['did you mean config/smoke.py']),
    ('--kernel=foo', ['kernel', 'mixed']), ('--lengths=300', ['lengths', 'block_size'])])
def test_a_wrong_flag_is_one_line_before_anything_is_touched(here, tmp_path, flag, words):
    run = here('train.py', flag)
    assert_refused(run.status, run.err, *words)
    assert os.listdir(tmp_path) == []

@pytest.mark.parametrize('text, words', [
    ('batch_size = = 3\n', ['line 1']), ('\n\nx = undefined\n', ['line 3', 'undefined']),
    ('batch_size = 0\n', ['batch_size']),
    ('batch_sise = 3\n', ['did you mean batch_size']), ("batch_size = '3'\n", ['whole number']),
    ('learning_rate = float("nan")\n', ['learning_rate'])])
def test_a_wrong_config_file_is_one_line(here, tmp_path, text, words):
    (tmp_path / 'c.py').write_text(text)
    run = here('train.py', 'c.py')
    assert_refused(run.status, run.err, *words)

def test_spellings_that_work(here, tmp_path):
    """1e3 for an int, an int for a float, none, true, a value with '=', flags before the config file."""
    (tmp_path / 'my config.py').write_text("learning_rate = 1\nbatch_size = 8.0\neval_lens = [16, 32]\n"
                                           "import math\n_helper = 3\npos = 'rope'\n"
                                           "wandb_run_name = f'x{batch_size}'\n")
    run = here('train.py', '--pos=nope', *[f for f in TINY if 'pos' not in f], '--label=a=b',
               '--eval_iters=1e2',
               '--pos_gamma0=none', '--bias=TRUE', '--decay_lr=0', 'my config.py', '--max_iters=0')
    assert run.status == 0, run.err
    c = run.names['config']
    assert (c['pos'], c['learning_rate'], c['batch_size'], c['eval_lens']) == ('nope', 1.0, 4, (16, 32))
    assert (c['eval_iters'], c['pos_gamma0'], c['bias'], c['decay_lr']) == (100, None, True, False)
    assert c['wandb_run_name'] == 'x8.0'
    assert type(c['learning_rate']) is float and type(c['eval_iters']) is int

@pytest.mark.slow
def test_every_number_runs_or_is_refused_by_name(here):
    """0, -1 and 1e30 of every number among the settings: a run that ends well, or one line that names it."""
    config = here('train.py', *TINY, '--max_iters=0').names['config']
    numbers = [k for k, v in config.items() if k != 'compile' and type(v) in (int, float) or v is None]
    assert {'batch_size', 'pos_gamma0', 'learning_rate', 'lr_decay_iters'} <= set(numbers)
    for key in numbers:
        for value in ('0', '-1', '1e30'):
            run = here('train.py', *TINY, '--max_iters=1', '--eval_lens=16', '--log_interval=1',
                       f'--{key}={value}')
            if run.status == 1: # it diverges, and says so
                assert_refused(run.status, run.err, code=1)
            elif run.status:
                assert_refused(run.status, run.err, key)

def test_help_prints_the_default_block(here):
    for script in ('train.py', 'sample.py'):
        out = here(script, '--help').out
        with open(os.path.join(ROOT, script), encoding='utf-8') as f:
            block = f.read().split('# ' + '-' * 77)[1]
        assert block.strip() in out and '--key=value' in out

def test_fuzzed_flags_never_end_in_a_traceback(capfd):
    rng = random.Random(1)
    defaults = dict(a=1, b=2.0, c=True, d='x', e=(), f=None,
                    __annotations__={'e': tuple[int, ...], 'f': float | None})
    for _ in range(500):
        argv = [rng.choice(['--', '-', '']) + rng.choice('abcdefg') + rng.choice(['=', '==', '']) +
                ''.join(rng.choices('0123456789.-+eE_,=noneTrue \0é', k=rng.randrange(6))) for _ in range(2)]
        try:
            config = configurator.configure(dict(defaults), {'x >= 0': 'a b f'}, argv)
            assert type(config['a']) is int and type(config['b']) is float and config['a'] >= 0
        except SystemExit as e:
            assert_refused(e.code, capfd.readouterr().err)

def test_device_choice_by_what_there_is(monkeypatch, capfd):
    """cuda before mps before cpu; bfloat16 where it is fast; compile on CUDA only; else one line."""
    def machine(cuda, mps, bf16=True):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda)
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda: bf16)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
        monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    for there, chosen in {(True, True, True): ('cuda', 'bfloat16', True),
                          (True, False, False): ('cuda', 'float32', True),
                          (False, True, True): ('mps', 'float32', False),
                          (False, False, True): ('cpu', 'float32', False)}.items():
        machine(*there)
        assert common.choose_device('', '', None) == chosen
    machine(True, False)
    assert common.choose_device('cuda:1', 'float16', False) == ('cuda:1', 'float16', False)
    for args in (('cuda:2', '', None), ('cuda:x', '', None), ('mps', '', None), ('gpu', '', None),
                 ('cpu', 'float16', None),
                 ('', 'float64', None)):
        with pytest.raises(SystemExit) as e:
            common.choose_device(*args)
        assert_refused(e.value.code, capfd.readouterr().err, args[0] or args[1])
