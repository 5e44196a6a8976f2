"""
ablate.py: statistics against published tables, rows that are never mixed, the report and the grid as a user
runs them.
"""

import csv
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from statistics import NormalDist

import numpy as np
import pytest

import ablate
import configurator
from runs import COLUMNS
from tasks import METRICS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, 'ablate.py')
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PLAIN = {
    'time': '2026-01-01T00:00:00', 'commit': 'abc', 'format': '2', 'config_hash': 'c0', 'run_hash': 'r0',
    'seed': '0',
    'label': 'rope', 'dataset': 'synth', 'note': 'mixed', 'metric': 'acc', 'pos': 'rope', 'n_layer': '1',
    'block_size': '16', 'batch_size': '4', 'max_iters': '2', 'learning_rate': '0.001', 'params': '100',
    'dtype': 'float32', 'wall_seconds': '1', 'val_loss': '.7',
}

def row(label='rope', seed=0, values=(.5,), **cells):
    """A row of results.csv with these metrics at L, 2L, 4L ..."""
    metrics = {16 * 2 ** n: [v, v - .1, v + .1, 100] for n, v in enumerate(values)}
    own = {'label': label, 'pos': label.partition(' ')[0], 'config_hash': label, 'seed': seed}
    return {name: '' for name in COLUMNS} | PLAIN | own | {'metrics': json.dumps(metrics)} | cells

def rows_of(label, values, **cells):
    """A row for each seed, from 0, with these accuracies."""
    return [row(label, seed, np.atleast_1d(v).tolist(), **cells) for seed, v in enumerate(values)]

def write(path, rows):
    with open(path, 'w', newline='', encoding='utf-8') as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)

def compared(path):
    """The panels of a csv, every difference filled in."""
    panels = ablate.read(path)
    ablate.compare(panels)
    return panels

def groups(path):
    """{(panel, encoding): seeds}"""
    return {(panel, name): len(group.seeds) for panel, encodings in ablate.read(path).items()
            for name, group in encodings.items()}

@pytest.fixture
def script(monkeypatch, capsys):
    """The script in this process, where nothing has to be loaded: (stdout, stderr), if the status is this."""
    def run(*flags, cwd, status=0):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, 'argv', [SCRIPT, *map(str, flags)])
        capsys.readouterr()
        ended, handlers = 0, {number: signal.getsignal(number) for number in SIGNALS}
        try:
            runpy.run_path(SCRIPT, run_name='__main__')
        except SystemExit as e:
            ended = e.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        assert ended == status, err
        return out, err
    return run

# -----------------------------------------------------------------------------
# statistics

# Student's t, 97.5%, as printed in Fisher and Yates' table, by degrees of freedom
T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101,
    19: 2.093, 20: 2.086, 21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052,
    28: 2.048, 29: 2.045, 30: 2.042, 31: 2.040, 32: 2.037, 33: 2.035, 34: 2.032, 35: 2.030, 36: 2.028,
    37: 2.026, 38: 2.024, 39: 2.023,
}

def sample(n, t):
    """n values whose t statistic is t."""
    x = np.arange(n, dtype=float)
    x -= x.mean()
    return x / x.std(ddof=1) + t / np.sqrt(n)

@pytest.mark.parametrize('n', range(2, 41))
def test_the_half_width_is_that_of_the_published_table(n):
    _, half, _ = ablate.t_interval([sample(n, 0)])
    assert half[0] * np.sqrt(n) == pytest.approx(T975[n - 1], abs=6e-4)

@pytest.mark.parametrize('n', range(2, 41))
def test_p_is_five_percent_at_the_published_quantile(n):
    _, _, p = ablate.t_interval([sample(n, T975[n - 1])])
    assert p[0] == pytest.approx(.05, abs=1e-4)

@pytest.mark.parametrize('df, t, p', [
    (2, 9.925, .01), (4, 4.604, .01), (9, 1.833, .1), (9, 3.250, .01), (29, 1.699, .1)])
def test_p_at_other_published_quantiles(df, t, p):
    assert ablate.t_interval([sample(df + 1, -t)])[2][0] == pytest.approx(p, rel=2e-3)

def test_one_seed_has_no_interval_and_no_p():
    mean, half, p = ablate.t_interval([[.25]])
    assert mean[0] == .25 and np.isnan(half[0]) and np.isnan(p[0])

def test_equal_everywhere_is_p_one():
    assert ablate.t_interval([[0., 0., 0.]])[2][0] == 1

def test_adjusted_p_of_the_worked_example():
    """The fifteen p of Benjamini and Hochberg's paper (1995), section 4, where four are rejected."""
    p = np.array([.0001, .0004, .0019, .0095, .0201, .0278, .0298, .0344, .0459, .3240, .4262, .5719, .6528,
                  .7590, 1])
    by_hand = [.0015, .0030, .0095, .035625, .0603, .063857, .063857, .0645, .0765, .486, .581182, .714875,
               .753231, .813214, 1]
    shuffled = np.random.default_rng(0).permutation(15)
    assert ablate.adjust(p[shuffled]) == pytest.approx(np.array(by_hand)[shuffled], abs=1e-6)

def test_a_single_p_is_not_adjusted():
    assert ablate.adjust(np.array([.03])) == [.03]

@pytest.mark.parametrize('mean, half, p, n, metric, word', [
    (.1, .01, .04, 3, 'acc', 'better'), (-.1, .01, .04, 3, 'acc', 'worse'),
    (-.1, .01, .04, 3, 'bpb', 'better'), (.1, .01, .05, 3, 'acc', 'undecided'),
    (.01, .01, .2, 3, 'acc', 'level'), (.01, .011, .2, 3, 'acc', 'undecided'),
    (.005, .001, .01, 3, 'acc', 'better'), (.1, .01, .001, 2, 'acc', 'n=2'),
    (.1, np.nan, np.nan, 1, 'acc', 'n=1')])
def test_words(mean, half, p, n, metric, word):
    assert ablate.verdict(mean, half, p, n, metric) == word

def test_every_encoding_and_length_of_the_csv_is_in_the_adjustment(tmp_path):
    """Whatever is shown: two encodings, two panels and two lengths make eight comparisons."""
    rng = np.random.default_rng(0)
    rows = [rows_of(e, rng.random((3, 2)), n_layer=n) for e in ('rope', 'alibi', 'nope') for n in (1, 2)]
    path = write(tmp_path / 'r.csv', sum(rows, []))
    assert ablate.compare(ablate.read(path)) == 8

def draw_csvs(rng, csvs, seeds, sd):
    """
    Accuracies (csvs, seeds, 2) of two encodings that are equally good: each seed of each has a truth around
    .8 of this sd, and is right or wrong on 1,024 rows of that seed. A row's luck is shared: normal scores
    with correlation .9.
    """
    cut = np.vectorize(NormalDist().inv_cdf)(np.clip(rng.normal(.8, sd, (csvs, seeds, 2)), .01, .99))
    right = np.zeros((csvs, seeds, 2))
    for n in range(0, csvs, 100): # in pieces: bounded memory
        luck = rng.standard_normal((len(cut[n:n + 100]), seeds, 1, 1024), np.float32) * .9 ** .5
        luck = luck + rng.standard_normal((len(luck), seeds, 2, 1024), np.float32) * .1 ** .5
        right[n:n + 100] = (luck < cut[n:n + 100, ..., None]).mean(axis=3)
    return right

def verdicts(draws):
    """The word for each of these csvs, a single comparison each."""
    mean, half, p = ablate.t_interval(draws[..., 1] - draws[..., 0])
    return [ablate.verdict(*one, draws.shape[1], 'acc') for one in zip(mean, half, p)]

def test_a_report_says_what_the_interval_says(tmp_path):
    """Through a csv, as it reads anybody's."""
    draws, said = draw_csvs(np.random.default_rng(0), 200, 3, .04), []
    for values in draws:
        path = write(tmp_path / 'r.csv', rows_of('rope', values[:, 0]) + rows_of('alibi', values[:, 1]))
        said.append(compared(path)['']['alibi'].cells[16]['difference']['verdict'])
    assert said == verdicts(draws) and len(set(said)) > 1

@pytest.mark.parametrize('sd', [.01, .04])
@pytest.mark.parametrize('seeds', [3, 5, 10])
def test_equal_encodings_are_called_different_in_one_table_of_twenty(seeds, sd):
    said = verdicts(draw_csvs(np.random.default_rng([seeds, int(100 * sd)]), 2000, seeds, sd))
    assert .03 <= np.isin(said, ['better', 'worse']).mean() <= .07

# -----------------------------------------------------------------------------
# what is compared with what

RUN_SETTINGS = [k for k in ablate.RUN if k not in ('metric', 'learning_rate')]

@pytest.mark.parametrize('column', RUN_SETTINGS)
def test_runs_that_differ_in_a_setting_are_panels_of_their_own(tmp_path, column):
    rows = [row(seed=seed, **{column: value}) for seed in (0, 1) for value in ('3', '4')]
    path = write(tmp_path / 'r.csv', rows)
    assert sorted(groups(path).values()) == [2, 2] and len(ablate.read(path)) == 2

OWN_SETTINGS = [k for k in COLUMNS if k.startswith('pos') and k != 'pos_params'] + ['config_hash']

@pytest.mark.parametrize('column', OWN_SETTINGS)
def test_encodings_of_one_label_that_differ_in_a_setting_are_told_apart(tmp_path, column):
    rows = [row('damped', seed, **{column: value}) for seed in (0, 1) for value in ('37aa', '37ab')]
    assert sorted(groups(write(tmp_path / 'r.csv', rows)).values()) == [2, 2]

def test_hashes_that_begin_alike_are_not_one(tmp_path):
    rows = [row('rope', seed, run_hash=h) for seed in (0, 1) for h in ('123456789012', '123456789013')]
    assert sorted(groups(write(tmp_path / 'r.csv', rows)).values()) == [2, 2]

def test_a_note_cannot_look_like_another_panel(tmp_path):
    notes = ('x', '2'), ('x n_layer=2', ''), ('x=', ''), ('y=', '1')
    rows = [row(note=note, n_layer=n) for note, n in notes]
    assert len(ablate.read(write(tmp_path / 'r.csv', rows))) == 4

def test_a_tuned_rate_is_the_encodings_and_finds_its_baseline(tmp_path):
    rows = rows_of('rope learning_rate=.003', [.5, .6, .7], learning_rate='.003')
    rows += rows_of('alibi learning_rate=.001', [.6, .6, .8], learning_rate='.001')
    panels = compared(write(tmp_path / 'r.csv', rows))
    assert [*panels] == [''] and 'difference' in panels['']['alibi learning_rate=.001'].cells[16]

def test_another_rate_that_is_no_encodings_is_another_panel(tmp_path):
    rows = [rows_of(e, [.5, .6], learning_rate=rate) for e in ('rope', 'alibi') for rate in ('.1', '.2')]
    panels = ablate.read(write(tmp_path / 'r.csv', sum(rows, [])))
    assert [*panels] == ['learning_rate=.1', 'learning_rate=.2']

def test_only_seeds_of_both_are_compared(tmp_path):
    rows = rows_of('rope', [.5, .5, .5]) + [row('alibi', seed, [.5 + seed]) for seed in (1, 2, 3)]
    cell = compared(write(tmp_path / 'r.csv', rows))['']['alibi'].cells[16]
    assert (cell['n'], cell['difference']['n'], cell['difference']['mean']) == (3, 2, 1.5)

def test_the_last_row_of_a_seed_counts(tmp_path):
    path = write(tmp_path / 'r.csv', [row(values=[.5]), row(values=[.75])])
    assert ablate.read(path)['']['rope'].seeds == {0: {16: .75}}

def test_lengths_that_were_not_measured_are_not_available(tmp_path):
    rows = rows_of('rope', [(.5, .6)] * 3) + rows_of('learned', [.5] * 3)
    panels = compared(write(tmp_path / 'r.csv', rows))
    learned = [line for line in ablate.table(panels[''], [16, 32]) if line[0] == 'learned']
    assert [line[3] for line in learned] == ['0.500 ±0.000', 'n/a']

def test_the_sign_and_the_margin_come_from_the_metric(tmp_path, monkeypatch):
    """A metric of somebody's own, of which less is better, and 5 is about the same."""
    monkeypatch.setitem(METRICS, 'error', ('error', -1, 5))
    rows = rows_of('rope', [100, 100.1, 99.9], metric='error')
    rows += rows_of('alibi', [80, 80.2, 80.1], metric='error')
    rows += rows_of('nope', [101, 99.9, 100], metric='error')
    encodings = compared(write(tmp_path / 'r.csv', rows))['']
    words = [encodings[name].cells[16]['difference']['verdict'] for name in ('alibi', 'nope')]
    assert words == ['better', 'level']

@pytest.mark.parametrize('cells', [
    dict(metrics='{"16": [NaN, 0, 1, 9]}'), dict(metrics='{"16": [0.5, 0, 1]}'), dict(metrics='{"16": 0.5}'),
    dict(metrics='{}'), dict(metrics='{"x": [0.5, 0, 1, 9]}'), dict(metrics='{"16": ["a", 0, 1, 9]}'),
    dict(metrics='{"16": [1e308, 0, 1, 9]}'), dict(metrics='{"16": [0.5, 0, 1, NaN]}'),
    dict(metrics='{"16": [0.5, 0, Infinity, 9]}'),
    dict(seed='x'), dict(block_size='0'), dict(block_size=''), dict(metric='zzz')])
def test_a_damaged_row_is_one_line(tmp_path, capsys, cells):
    path = write(tmp_path / 'odd.csv', [row(), row(**cells)])
    with pytest.raises(SystemExit) as e:
        ablate.read(path)
    assert e.value.code == 1 and 'odd.csv' in (line := capsys.readouterr().err) and line.count('\n') == 1

def test_a_row_of_one_window_has_no_interval_and_is_shown(script, tmp_path):
    write(tmp_path / 'r.csv', [row(metrics='{"16": [0.5, NaN, NaN, 1]}')])
    out, _ = script('--report=r.csv', '--plot=False', cwd=tmp_path)
    assert '0.500' in out and 'nan' not in out

def test_a_cell_that_is_no_number_cannot_be_drawn_by(script, tmp_path):
    write(tmp_path / 'r.csv', [row(n_layer='x')])
    _, err = script('--report=r.csv', '--figure=n_layer', cwd=tmp_path, status=1)
    assert 'damaged' in err and err.count('\n') == 1

def test_a_blank_label_does_not_end_a_report(script, tmp_path):
    write(tmp_path / 'r.csv', [row(label=' ', seed=seed, config_hash='c') for seed in (0, 1)])
    out, _ = script('--report=r.csv', cwd=tmp_path)
    assert 'r.png' in out

@pytest.mark.parametrize('flag', [
    '--seeds=0', '--jobs=2', '--learning_rate=.1', '--tune_seeds=1', '--out_dir=x', '--results=x.csv'])
def test_what_belongs_to_runs_is_refused_in_a_report(script, tmp_path, flag):
    write(tmp_path / 'r.csv', [row()])
    _, err = script('--report=r.csv', flag, cwd=tmp_path, status=2)
    assert flag.partition('=')[0] in err and err.count('\n') == 1

@pytest.mark.slow
@pytest.mark.parametrize('encodings', [20, 5000])
def test_a_report_of_100000_rows_takes_seconds_and_500_MB(tmp_path, encodings):
    rng, labels = np.random.default_rng(0), ['rope'] + [f'damped c={n}' for n in range(encodings - 1)]
    each = 100_000 // encodings
    write(tmp_path / 'big.csv', (r | {'time': rng.random()} for label in labels
                                 for r in rows_of(label, rng.random((each, 4)).round(6))))
    # the peak of this process itself: what rusage tells of children is the peak of all that there ever were
    code = ('import atexit, re, runpy, sys\n'
            'def peak():\n'
            '    status = open("/proc/self/status").read()\n'
            '    print(re.search(r"VmHWM:\\s*(\\d+)", status)[1], file=sys.stderr)\n'
            'atexit.register(peak)\n'
            'sys.path.insert(0, sys.argv[1])\n'
            'sys.argv = ["ablate.py", "--report=big.csv"]\n'
            'runpy.run_module("ablate", run_name="__main__")')
    start = time.monotonic()
    p = subprocess.run([sys.executable, '-c', code, ROOT], cwd=tmp_path, check=True, text=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seconds, kb = time.monotonic() - start, int(p.stderr.split()[-1])
    print(f"{encodings} encodings: {seconds:.1f} s, {kb / 1024:.0f} MB")
    assert seconds < 60 and kb < 500 * 1024

# -----------------------------------------------------------------------------
# the report as a user runs it

@pytest.fixture
def study(tmp_path):
    """A csv of three encodings, one with a name that Markdown could take amiss, in two panels."""
    rng = np.random.default_rng(0)
    rows = [rows_of(label, rng.random((3, 3)).round(3), n_layer=n, data_checksum='d1')
            for label in ('rope', 'damped c=1', 'a|b<c>*`$') for n in '12']
    write(tmp_path / 'study.csv', sum(rows, []))
    return tmp_path

def test_the_last_line_is_json_with_every_difference(script, study):
    out, _ = script('--report=study.csv', '--plot=False', cwd=study)
    panels = json.loads(out.splitlines()[-1])['panels']
    assert [len(encodings) for encodings in panels.values()] == [3, 3]
    assert panels['n_layer=2']['damped c=1']['64']['difference'].keys() == {
        'n', 'mean', 'half', 'p', 'adjusted_p', 'verdict'}

def test_a_table_in_the_terminal_has_100_columns(script, study):
    out, _ = script('--report=study.csv', '--plot=False', cwd=study)
    assert max(map(len, out.splitlines()[:-1])) <= 100

def test_a_long_name_has_a_line_of_its_own(script, tmp_path):
    name = 'jordan_stabilized_abs ' + ' '.join(f'setting{n}={n}' for n in range(12))
    write(tmp_path / 'r.csv', [row(label, seed) for label in ('rope', name) for seed in range(3)])
    out, _ = script('--report=r.csv', '--plot=False', cwd=tmp_path)
    assert max(map(len, out.splitlines()[:-1])) <= 100 and 'setting11=11' in out

def test_markdown_has_every_length_and_is_the_same_whatever_is_shown(script, study):
    def tables(*flags):
        script('--report=study.csv', '--plot=False', *flags, cwd=study)
        return [line for line in (study / 'study.md').read_text('utf-8').splitlines() if line[:1] in '|#']
    everything = tables()
    assert everything == tables('--pos=damped c=1') and sum('damped c=1' in line for line in everything) == 6

def test_markdown_escapes_what_it_would_take_amiss(script, study):
    script('--report=study.csv', '--plot=False', cwd=study)
    assert r'| a\|b\<c\>\*\`\$ | 1L | 3 |' in (study / 'study.md').read_text('utf-8')

def test_data_from_a_file_condition_the_interval(script, study):
    out, _ = script('--report=study.csv', '--plot=False', cwd=study)
    assert 'conditional on it' in out and 'conditional on it' in (study / 'study.md').read_text('utf-8')

def test_what_is_not_there_is_refused_by_name(script, study):
    for flag in ('--pos=ropee', '--baseline=ropee'):
        _, err = script('--report=study.csv', flag, cwd=study, status=2)
        assert 'ropee' in err and 'damped c=1' in err and err.count('\n') == 1

def test_a_figure_for_each_panel(script, study):
    script('--report=study.csv', cwd=study)
    assert sorted(p.name for p in study.glob('*.png')) == ['study_n_layer_1.png', 'study_n_layer_2.png']

@pytest.mark.parametrize('figure', ['difference', 'n_layer'])
def test_the_other_figures(script, study, figure):
    out, _ = script('--report=study.csv', f'--figure={figure}', cwd=study)
    assert '.png' in out.splitlines()[-2]

def test_no_interval_below_three_seeds_and_nothing_above_one(monkeypatch, tmp_path):
    """What is drawn, read back from the axes."""
    rows = rows_of('rope', [(.999, .9)] * 2) + rows_of('alibi', [(.99, .9), (.995, .9), (1, .9)])
    path, seen = write(tmp_path / 'r.csv', rows), []
    panels = compared(path)
    monkeypatch.setattr(ablate, 'save_figure', lambda fig, path: seen.append(fig.axes[0]))
    ablate.figures(path, panels, [])
    bars = [container.lines[2][0].get_paths() for container in seen[0].containers]
    known = [sum(bool(np.isfinite(path.vertices).all()) for path in paths if len(path)) for paths in bars]
    assert known == [0, 2]
    assert seen[0].get_ylim()[1] == 1

def test_seven_lines_at_most_each_with_its_name(monkeypatch, tmp_path):
    labels = ['rope', 'nope', 'alibi', 'damped', 'damped c=1', *(f'own{n}' for n in range(6))]
    rows = [row(label, values=[n / 20, .3]) for n, label in enumerate(labels)]
    path, seen = write(tmp_path / 'r.csv', rows), []
    panels = compared(path)
    monkeypatch.setattr(ablate, 'save_figure', lambda fig, path: seen.append(fig.axes[0]))
    ablate.figures(path, panels, [])
    names = {text.get_text() for text in seen[0].texts} & set(labels)
    assert len(names) == 7 and 'rope' in names and seen[0].get_legend() is None

def test_a_notebooks_backend_and_a_console_that_cannot_print_it_do_not_end_a_report(study):
    env = os.environ | {'PYTHONIOENCODING': 'ascii',
                        'MPLBACKEND': 'module://matplotlib_inline.backend_inline'}
    command = [sys.executable, SCRIPT, '--report=study.csv']
    subprocess.run(command, cwd=study, check=True, capture_output=True, env=env)

# -----------------------------------------------------------------------------
# the grid, with a train.py that takes no time: its loss is far from that of the best rate, .01

TRAIN = """
import csv, json, os, signal, sys, time
flags = dict(a[2:].split('=', 1) for a in sys.argv[1:] if a.startswith('--'))
if 'typo' in flags:
    sys.exit('train.py: --typo: no such setting')
with open('commands.txt', 'a') as f:
    f.write(json.dumps(flags) + '\\n')
if 'dry_run' in flags:
    sys.exit()
if 'kill' in flags:
    os.kill(os.getpid(), int(flags['kill']))
if 'ends' in flags:
    print('saved at iteration 3')
    sys.exit(143)
os.makedirs(flags['out_dir'])
def save(number, frame):
    open(flags['out_dir'] + '/saved', 'w').close()
    sys.exit(128 + number)
for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
    signal.signal(getattr(signal, name), save)
open(flags['out_dir'] + '/began', 'w').close()
time.sleep(float(flags.get('wait', 0)))
loss = abs(float(flags.get('learning_rate', 0)) - .01)
row = PLAIN | dict(label=flags['label'], pos=flags['pos'], seed=flags['seed'], config_hash=flags['label'])
row |= dict(learning_rate=flags.get('learning_rate', ''), val_loss=loss)
row |= dict(metrics=json.dumps({16: [.5, .4, .6, 9]}))
new = not os.path.exists(flags['results'])
with open(flags['results'], 'a', newline='') as f:
    writer = csv.DictWriter(f, COLUMNS)
    if new:
        writer.writeheader()
    writer.writerow({name: row.get(name, '') for name in COLUMNS})
print('a word: \\u00e9')
print(json.dumps(row))
"""

@pytest.fixture
def grid(script, tmp_path, monkeypatch):
    """ablate.py with that train.py."""
    (tmp_path / 'train.py').write_text(f'COLUMNS, PLAIN = {COLUMNS!r}, {PLAIN!r}\n' + TRAIN, 'utf-8')
    monkeypatch.setattr(configurator, 'ROOT', str(tmp_path))
    def run(*flags, status=0):
        return script('config.py', '--plot=False', '--results=r.csv', *flags, cwd=tmp_path, status=status)
    return run

def commands(tmp_path):
    """The flags of every run, dry ones left out."""
    lines = (tmp_path / 'commands.txt').read_text().splitlines()
    return [flags for flags in map(json.loads, lines) if 'dry_run' not in flags]

def test_a_run_for_every_encoding_and_seed(grid, tmp_path):
    grid('--pos=rope,damped:pos_c=.1', '--seeds=0,1', '--jobs=2')
    assert sorted((c['label'], c['pos'], c['seed']) for c in commands(tmp_path)) == [
        ('damped c=0.1', 'damped', '0'), ('damped c=0.1', 'damped', '1'),
        ('rope', 'rope', '0'), ('rope', 'rope', '1')]

def test_flags_that_are_not_its_own_and_settings_of_one_encoding_reach_train(grid, tmp_path):
    grid('--pos=rope,damped:pos_c=.1', '--seeds=0', '--n_layer=3')
    assert [(c['n_layer'], c.get('pos_c')) for c in commands(tmp_path)] == [('3', None), ('3', '.1')]

def test_a_report_follows_the_runs(grid, tmp_path):
    out, _ = grid('--pos=rope,damped', '--seeds=0,1,2')
    damped = json.loads(out.splitlines()[-1])['panels']['']['damped']
    assert damped['16']['difference']['verdict'] == 'level'

def test_the_rate_is_tuned_on_seeds_that_are_not_reported(grid, tmp_path):
    out, _ = grid('--pos=rope', '--seeds=0,1', '--learning_rate=.001,.01,.1', '--tune_seeds=7,8')
    assert 'rope: learning rate 0.01 of' in out
    assert groups(tmp_path / 'r.csv') == {('', 'rope learning_rate=0.01'): 2}
    assert sum(groups(tmp_path / 'r_tune.csv').values()) == 6

@pytest.mark.parametrize('flags, words', [
    (['--pos=rope,rope'], ['--pos', 'rope', 'twice']),
    (['--pos=damped:pos_c=1,damped:pos_c=1.0'], ['damped c=1', 'twice']),
    (['--pos=rope', '--seeds=0,-1'], ['seeds', '-1']), (['--pos=rope', '--eval_only=True'], ['--eval_only']),
    (['--pos=rope:seed=5'], ['seed']), (['--pos=rope:out_dir=x'], ['out_dir']),
    (['--pos=rope', '--seeds=0,0'], ['--seeds', 'twice']), (['--pos=rope', '--seed=1'], ['--seed']),
    (['--pos=rope', '--label=x'], ['--label']), (['--pos='], ['--pos']),
    (['--pos=rope', '--jobs=0'], ['jobs']),
    (['--pos=rope:learning_rate=1', '--learning_rate=1,2'], ['rope:learning_rate=1', 'of its own']),
    (['--pos=rope', '--learning_rate=1,2', '--seeds=0,1000'], ['tune_seeds', '1000']),
    (['--pos=rope', '--seeds=0,-1'], ['seeds']), (['--pos=rope', '--tune_seeds=5000000000'], ['tune_seeds']),
    (['--pos=rope', '--learning_rate=.1,0'], ['learning_rate']),
    (['--pos=rope', '--eval_only=True'], ['--eval_only', 'a grid trains']),
    (['--pos=rope', '--extend=True'], ['--extend', 'a grid trains']),
    *[([f'--pos=rope:{key}=1'], [f'rope:{key}=1', 'a grid']) for key in
      'seed label json init_from skip_done dry_run out_dir results pos eval_only extend'.split()],
    (['--pos=rope', '--figure=note'], ['figure']),
    (['--pos=rope', '--typo=1'], ['--typo', 'no such setting']),
    (['--pos=rope,damped:typo=1'], ['--typo', 'no such setting'])])
def test_what_cannot_work_is_one_line_before_any_run(grid, tmp_path, flags, words):
    _, err = grid(*flags, status=2)
    assert err.count('\n') == 1 and all(word in err for word in words)
    assert not (tmp_path / 'commands.txt').exists() or not commands(tmp_path)

@pytest.mark.parametrize('text', ['\ufeff' + ','.join(COLUMNS) + '\n', 'time,commit\n'])
def test_a_csv_of_other_columns_is_refused_before_any_run(grid, tmp_path, text):
    (tmp_path / 'r.csv').write_text(text, 'utf-8')
    _, err = grid('--pos=rope', status=1)
    assert 'r.csv' in err and err.count('\n') == 1 and not (tmp_path / 'commands.txt').exists()

def test_a_run_that_fails_is_said_and_the_others_go_on(grid, tmp_path):
    (tmp_path / 'out-ablate' / 'rope_s0').mkdir(parents=True) # so that this train.py dies
    out, err = grid('--pos=rope,damped', '--seeds=0', status=1)
    assert 'rope seed=0: FAILED' in out and '1 of 2 runs failed' in err and len(commands(tmp_path)) == 2

@pytest.mark.parametrize('flag, words', [
    ('--kill=9', 'killed by SIGKILL (out of memory?)'), ('--kill=35', 'killed by signal 35'), # it has no name
    ('--ends=1', 'saved at iteration 3')])
def test_how_a_run_was_ended_is_said(grid, flag, words):
    _, err = grid('--pos=rope', '--seeds=0', flag, status=1)
    assert words in err and 'no word' not in err

def test_a_full_disk_behind_stdout_is_named(grid, monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, 'No space left on device')
    monkeypatch.setattr(sys, 'stdout', Full())
    _, err = grid('--pos=rope', '--seeds=0', status=1)
    assert 'stdout cannot be written (No space left' in err and 'SIGTERM' not in err

def test_a_reader_that_went_away_is_no_signal(grid, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError
    monkeypatch.setattr(sys, 'stdout', Closed())
    _, err = grid('--pos=rope', '--seeds=0', status=141)
    assert not err

def test_without_scipy_nothing_is_run(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    _, err = grid('--pos=rope', status=2)
    assert 'pip install scipy' in err and not (tmp_path / 'commands.txt').exists()

@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_reaches_every_run_and_they_save(grid, tmp_path, number):
    def when_both_began():
        while len(list(tmp_path.glob('out-ablate/*/began'))) < 2:
            time.sleep(.02)
        os.kill(os.getpid(), number)
    threading.Thread(target=when_both_began, daemon=True).start()
    _, err = grid('--pos=rope,damped,nope', '--seeds=0', '--jobs=2', '--wait=60', status=128 + number)
    assert len(list(tmp_path.glob('out-ablate/*/saved'))) == 2 and len(commands(tmp_path)) == 2
    assert err.strip() == f'ablate.py: stopped by {number.name}; the same command goes on where it was'

@pytest.mark.slow
def test_a_grid_of_the_real_train_is_made_once(script, tmp_path):
    flags = '''--block_size=16 --n_embd=16 --n_head=2 --batch_size=4 --eval_iters=32 --eval_rows=32
               --max_iters=2 --warmup_iters=1 --pos=damped:pos_c=1 --seeds=0 --plot=False'''.split()
    def ablated():
        out, _ = script('config/smoke.py', *flags, cwd=tmp_path)
        return json.loads(out.splitlines()[-1]), (tmp_path / 'out-ablate' / 'results.csv').read_text()
    first, text = ablated()
    assert [*first['panels']['']] and ablated() == (first, text) and text.count('\n') == 2
