"""
Encodings x seeds of one config, and the table and figure of what came out.

    python ablate.py config/synth_jordan.py --pos=rope,rope_hi,jordan_stabilized --seeds=0,1,2
    python ablate.py config/synth_jordan.py --pos=damped,damped:pos_c=1   # settings of one encoding after ':'
    python ablate.py config/synth_jordan.py --pos=rope,damped --learning_rate=3e-4,1e-3,3e-3   # tune it first
    python ablate.py --report=results/linear.csv                          # table and figure once more
    python ablate.py --report=results/linear.csv --pos=rope,damped:pos_c=1 --figure=difference    # of some

Runs train.py once per encoding and seed; flags that are not its own go to train.py. What results.csv holds
is skipped, what a Ctrl-C cut off goes on where it stopped. The report needs the csv alone: X.csv gives
X.md, with every encoding and length, and X.png. Its last line is one JSON object.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace

from configurator import ROOT, configure, typed, usage # before torch: it makes Ctrl-C one line

import numpy as np

from common import COLORS, fail, kind_of, pyplot, save_figure
from runs import check_results, read_rows
from tasks import METRICS, TASKS

# -----------------------------------------------------------------------------
pos = '' # to run: rope,damped:pos_c=1,jordan_stabilized:pos_eta0=.5; of a report those to show, '' is all
seeds: tuple[int, ...] = (0, 1, 2)
jobs = 1 # runs at the same time; give each its threads with OMP_NUM_THREADS
learning_rate: tuple[float, ...] = () # several: each encoding takes the best by validation loss on tune_seeds
tune_seeds: tuple[int, ...] = (1000,) # never reported
out_dir = 'out-ablate' # a folder per run
results = '' # csv; '' is results.csv in out_dir
report = '' # only report on this csv
baseline = 'rope' # what every encoding is compared with, seed by seed
plot = True # draw the figure
figure = 'value' # or 'difference' to the baseline; or a column (attn_temperature): that at the far end, by it
title = '' # of table and figure; '' says what is compared
# -----------------------------------------------------------------------------
OWN = '''
    pos seeds jobs learning_rate tune_seeds out_dir results report baseline plot figure title h help
'''.split()

# settings of train.py that no flag may give, and those of no run that trains from its start
SET_BY_GRID = 'seed label json init_from skip_done dry_run'.split()
NO_TRAINING = 'eval_only extend'.split()

# -----------------------------------------------------------------------------
# run

children, caught = set(), []

def on_signal(number, frame=None):
    """Ctrl-C, SIGTERM, a closed terminal: each train.py gets it too and saves; a second ends them at once."""
    caught.append(number)
    for child in list(children):
        child.send_signal(number)

def name_of(number):
    """SIGKILL of 9; real-time signals have no name."""
    return signal.Signals(number).name if number in [*signal.Signals] else f'signal {number}'

def label_of(spec, rate=None):
    """'damped:pos_c=.1' -> 'damped c=0.1': the name of its rows. A rate that was tuned belongs to it."""
    words = spec.split(':')
    if rate is not None:
        words.append(f'learning_rate={rate}')
    for n, word in enumerate(words):
        key, equals, value = word.partition('=')
        with suppress(ValueError):
            value = f'{float(value):g}'
        words[n] = key.removeprefix('pos_') + equals + value
    return ' '.join(words)

def train(spec, seed, rate, csv, how):
    """One train.py in a folder of its own, resumed if it was cut off: (its last line, what went wrong)."""
    label = label_of(spec, rate)
    folder = os.path.join(out_dir, re.sub(r'[^\w.+=-]', '_', f'{label}_s{seed}'))
    name, *settings = spec.split(':')
    if rate is not None:
        settings.append(f'learning_rate={rate}')
    settings += [f'label={label}', f'seed={seed}', f'out_dir={folder}', f'results={csv}', 'json=True', how]
    if how == 'skip_done=True' and os.path.exists(os.path.join(folder, 'ckpt.pt')):
        settings.append('init_from=resume')
    command = [os.path.join(ROOT, 'train.py'), *files, *theirs, f'--pos={name}']
    command += [f'--{setting}' for setting in settings]

    # in a session of its own: a Ctrl-C of the terminal reaches it once, through on_signal. Where this process
    # is killed, the pipe closes: it saves and ends at the next line that it prints
    if caught:
        return '', 'stopped'
    with subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, encoding='utf-8', errors='replace', start_new_session=True,
                          env=os.environ | {'PYTHONIOENCODING': 'utf-8'}) as child:
        children.add(child)
        if caught: # since the line above
            child.send_signal(caught[-1])
        out, err = child.communicate()
        children.discard(child)
    if child.returncode:
        says = (out.strip() or err) if child.returncode > 128 else err # a signal that it took itself
        last = (says.strip().splitlines() or ['no word'])[-1]
        if child.returncode < 0:
            last = f'killed by {name_of(-child.returncode)}'
            last += ' (out of memory?)' if last.endswith('SIGKILL') else ''
        return '', f"{last}\n  status {child.returncode} of {shlex.join(command)}"
    return out.strip().rpartition('\n')[2], ''

def check(specs):
    """train.py as far as its model, once per encoding: what it would refuse is said before anything runs."""
    with ThreadPoolExecutor(jobs) as pool:
        for _, error in pool.map(lambda spec: train(spec, seeds[0], None, results, 'dry_run=True'), specs):
            if error and not caught:
                usage(error.splitlines()[0])

def run_grid(grid, csv):
    """[(spec, seed, rate)] -> the validation loss of each, `jobs` at a time, with progress and time left."""
    start, losses, failed, lost = time.monotonic(), [], [], None
    with ThreadPoolExecutor(jobs) as pool:
        for last, error in pool.map(lambda run: train(*run, csv, 'skip_done=True'), grid):
            if caught:
                break
            spec, seed, rate = grid[len(losses)]
            losses.append(math.nan if error else json.loads(last)['val_loss'])
            if error:
                failed.append(error)
            left = (time.monotonic() - start) / len(losses) * (len(grid) - len(losses))
            value = 'FAILED' if error else f'val loss {losses[-1]:.4f}'
            try:
                print(f"[{len(losses)}/{len(grid)}] {label_of(spec, rate)} seed={seed}: {value}, "
                      f"ETA {timedelta(seconds=round(left))}", flush=True)
            except OSError as e: # nobody reads this any more, or no room is left
                sys.stdout, lost = open(os.devnull, 'w'), e
                on_signal(signal.SIGTERM)
    if isinstance(lost, BrokenPipeError):
        sys.exit(141)
    if lost:
        fail(f"stdout cannot be written ({lost.strerror}); the same command goes on where it was")
    if caught:
        with suppress(OSError):
            print(f"ablate.py: stopped by {name_of(caught[0])}; the same command goes on where it was",
                  file=sys.stderr)
        sys.exit(128 + caught[0])
    if failed:
        fail(f"{len(failed)} of {len(grid)} runs failed, the rest is in {csv}; the first: {failed[0]}")
    return losses

def tuned(specs):
    """{spec: the rate of its best mean validation loss over tune_seeds}; these rows are in X_tune.csv."""
    grid = [(spec, seed, rate) for spec in specs for rate in learning_rate for seed in tune_seeds]
    losses = run_grid(grid, results.removesuffix('.csv') + '_tune.csv')
    best = {}
    for spec, mean in zip(specs, np.reshape(losses, (len(specs), len(learning_rate), -1)).mean(axis=2)):
        best[spec] = learning_rate[mean.argmin()]
        tried = ', '.join(f'{rate:g} ({loss:.4f})' for rate, loss in zip(learning_rate, mean))
        print(f"{spec}: learning rate {best[spec]:g} of {tried}")
    return best

# -----------------------------------------------------------------------------
# statistics. The unit is a training seed: its test rows are new, and the same for every encoding, so that the
# paired interval over seeds covers the error of the rows

def t_interval(samples):
    """Of each sample: mean, half width of the 95% t interval, p of a mean of 0; nan for one value alone."""
    from scipy import stats
    n = np.array([len(x) for x in samples])
    mean = np.array([np.mean(x) for x in samples])
    error = np.array([np.std(x, ddof=1) if len(x) > 1 else np.nan for x in samples]) / np.sqrt(n)
    with np.errstate(divide='ignore', invalid='ignore'):
        p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return mean, stats.t.ppf(.975, n - 1) * error, np.where((mean == 0) & (error == 0), 1, p)

def adjust(p):
    """Benjamini-Hochberg: each p for the number of tests that were made. That of a single test stays."""
    order = np.argsort(-p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    return adjusted

def verdict(mean, half, p, n, metric):
    """better or worse (adjusted p < .05), level (within the margin), undecided; no word below three seeds."""
    _, sign, margin = METRICS[metric][:3]
    if n < 3:
        return f'n={n}'
    if p < .05:
        return 'better' if mean * sign > 0 else 'worse'
    return 'level' if abs(mean) + half <= margin else 'undecided'

# -----------------------------------------------------------------------------
# report: what is compared with what

# settings that are no encoding's. Rows that differ in one of them are in panels of their own
RUN = '''
    dataset note metric n_layer n_head n_embd attn_temperature block_size batch_size max_iters weight_decay
    dtype data_checksum run_hash learning_rate
'''.split()

def names(columns, settings):
    """{setting: 'n_layer=2 weight_decay=0.1'}: the columns that tell it apart, if those before do not."""
    told, parts = {setting: () for setting in settings}, 1
    for n, column in enumerate(columns):
        key, finer = column.removeprefix('pos_').removesuffix('_hash'), {}
        for setting, words in told.items():
            value = repr(setting[n]) if ' ' in setting[n] else setting[n]
            finer[setting] = (*words, f'{key}={value}' if value else '')
        if len(set(finer.values())) > parts:
            told, parts = finer, len(set(finer.values()))
    return {setting: ' '.join(filter(None, words)) for setting, words in told.items()}

def read(path):
    """
    A csv as {panel: {encoding: group}}. A group has the rows of one setting, never of two that differ in a
    column or hash: seeds {seed: {T: value}}; of its last row all columns, L, lengths {T: [value, lo, hi, n]}.
    """
    groups = {}
    for row in read_rows(path):
        try:
            seed, L = int(row['seed']), int(row['block_size'])
            lengths = {int(T): values for T, values in json.loads(row['metrics']).items()}
            values = np.array([*lengths.values()], float) # of no metric is a value that large
            known = abs(values) < 1e30
            known[:, 1:3] |= np.isnan(values[:, 1:3]) # of one window no interval is known
            sound = min(L, *lengths) > 0 and values.shape[1] == 4 and known.all()
            lengths = dict(zip(lengths, values.tolist()))
            if figure in RUN:
                sound = sound and math.isfinite(float(row[figure]))
        except (ValueError, TypeError, IndexError, OverflowError):
            sound = False
        if not sound or row['metric'] not in METRICS:
            fail(f"{path}: the row of label={row['label']!r} seed={row['seed']!r} is damaged; take it out")
        own = ['learning_rate', *(k for k in row if k.startswith('pos') and k != 'pos_params'), 'config_hash']
        run, setting = (tuple(row[k].removesuffix('.0') for k in columns) for columns in (RUN[:-1], own))
        group = groups.setdefault((row['label'], run, setting), SimpleNamespace(seeds={}))
        group.seeds[seed] = {T: v[0] for T, v in lengths.items()} # the last row of a seed counts
        group.row, group.L, group.lengths = row, L, lengths
    if not groups:
        fail(f"{path}: no such file, or no rows of train.py in it; ablate.py without --report makes one")

    # a rate that was tuned is the encoding's, another one the panel's
    panels, tuned = {}, any(' learning_rate=' in label for label, _, _ in groups)
    for (label, run, setting), group in groups.items():
        run = (*run, '' if tuned else setting[0])
        panels.setdefault(run, {}).setdefault(label, {})[setting] = group

    # names for people; rows of one label that differ are told apart
    named = {}
    for run, panel in names(RUN, panels).items():
        named[panel] = {}
        for label, settings in panels[run].items():
            for setting, name in names(own, settings).items():
                name = f'{label} {name}'.strip()
                name += f' {setting[-1]}' if name in named[panel] else ''
                named[panel][name] = settings[setting]
    return named

def base_of(encodings):
    """The baseline's name among these, perhaps with the rate that was tuned for it; '' if it is not there."""
    tuned = [name for name in encodings if name.startswith(f'{baseline} learning_rate=')]
    return baseline if baseline in encodings else tuned[0] if len(tuned) == 1 else ''

def compare(panels):
    """
    Gives every group cells {T: {n, mean, half, difference}}: the metric at a length, and the difference to
    the baseline over the seeds that both have, p adjusted for all of the csv. Returns how many were compared.
    """
    cells, tests = [], []
    for encodings in panels.values():
        base = encodings.get(base_of(encodings))
        for group in encodings.values():
            group.cells = {T: {} for T in sorted({T for values in group.seeds.values() for T in values})}
            for T, cell in group.cells.items():
                at = {seed: values[T] for seed, values in group.seeds.items() if T in values}
                cells.append((cell, list(at.values())))
                both = [s for s in at if base and T in base.seeds.get(s, {})]
                if both and group is not base:
                    tests.append((cell, [at[s] - base.seeds[s][T] for s in both], group.row['metric']))

    for (cell, x), mean, half, _ in zip(cells, *t_interval([x for _, x in cells])):
        cell |= dict(n=len(x), mean=mean, half=half)
    mean, half, p = t_interval([x for _, x, _ in tests])
    known = ~np.isnan(p) # one seed alone is no test
    adjusted = p.copy()
    adjusted[known] = adjust(p[known])
    for (cell, x, metric), m, h, p, q in zip(tests, mean, half, p, adjusted):
        word = verdict(m, h, q, len(x), metric)
        cell['difference'] = dict(n=len(x), mean=m, half=h, p=p, adjusted_p=q, verdict=word)
    return int(known.sum())

def best_first(encodings):
    """By the metric at the longest context; who was not measured there comes last."""
    far = max(T for group in encodings.values() for T in group.cells)
    def rank(name):
        group, sign = encodings[name], METRICS[encodings[name].row['metric']][1]
        return far not in group.cells, -sign * group.cells.get(far, {'mean': 0})['mean']
    return {name: encodings[name] for name in sorted(encodings, key=rank)}

# -----------------------------------------------------------------------------
# report: tables

def plus_minus(x, sign=''):
    """0.982 ±0.009, of a cell or of its difference."""
    return f"{x['mean']:{sign}.3f}" + (f" ±{x['half']:.3f}" if x['n'] > 1 else '')

def small(p):
    return 'n/a' if math.isnan(p) else '<.001' if p < .001 else f'{p:.3f}'

def table(encodings, lengths):
    """Lists of cells, a line for every encoding and length; n/a: not measured there, or no baseline."""
    lines = [['encoding', 'length', 'n', 'mean', 'difference', 'p', 'adj. p', 'verdict']]
    for name, group in encodings.items():
        for T in lengths:
            n, mean, compared = '', 'n/a', ['n/a', '', '', '']
            if cell := group.cells.get(T):
                n, mean = str(cell['n']), plus_minus(cell)
                low, high = group.lengths.get(T, [math.nan] * 4)[1:3]
                if n == '1' and low <= high: # the interval of its rows or windows, where it is known
                    mean += f' ({low:.3f}-{high:.3f})'
            if cell and 'difference' in cell:
                d = cell['difference']
                compared = [plus_minus(d, '+'), small(d['p']), small(d['adjusted_p']), d['verdict']]
                if d['n'] < cell['n']: # the baseline lacks some
                    n = f"{d['n']}/{n}"
            elif name == base_of(encodings):
                compared = ['', '', '', 'baseline']
            lines.append([name, f'{T / group.L:g}L', n, mean, *compared])
    return lines

def as_text(lines):
    """In 100 columns; a long name has a line of its own."""
    width = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    width[0] = min(width[0], 100 - sum(w + 2 for w in width[1:]))
    for name, *cells in lines:
        if len(name) > width[0]:
            print(textwrap.fill(name, 100))
            name = ''
        print(name.ljust(width[0]), *(cell.rjust(w) for cell, w in zip(cells, width[1:])), sep='  ')

def markdown(text):
    return re.sub(r'([\\|*<>`$\[\]])', r'\\\1', ' '.join(text.split()))

def as_markdown(lines):
    lines = [lines[0], ['---'] * len(lines[0]), *lines[1:]]
    return [f"| {' | '.join(map(markdown, line))} |" for line in lines]

def caption(path, panels, count):
    """What the numbers are."""
    rows = [group.row for encodings in panels.values() for group in encodings.values()]
    metrics = [METRICS[m] for m in sorted({row['metric'] for row in rows})]
    yield (f"{' and '.join(m[0] for m in metrics)}: mean over n seeds ± 95% t interval. difference: to "
           f"{baseline}, paired by seed; p of a t test, and adjusted (Benjamini-Hochberg) for the {count} "
           f"comparisons of {os.path.basename(path)}. better, worse: adjusted p < .05; level: the interval "
           f"lies within {' and '.join(f'±{m[2]:g}' for m in metrics)}; else undecided, even where the "
           f"interval, which is not adjusted, leaves out 0. No word below n = 3.")
    for data in sorted({f"{row['dataset']} {row['data_checksum']}" for row in rows if row['data_checksum']}):
        yield f"Data from a file, {data}: every interval is conditional on it."

# -----------------------------------------------------------------------------
# report: figures

def draw(path, curves, heading, xlabel, ylabel, level, word, top):
    """{name: [(x, cell)]} as lines, named at their ends; a bar is a 95% interval, of three seeds or more."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7.5, 4.3), layout='constrained')
    seen, ends, colors = [], [], []
    for n, (name, points) in enumerate(curves.items()):
        kind = kind_of(name)
        color = COLORS.get(kind, COLORS.get(kind.partition('+')[0], '#444444'))
        style = ['-', '--', ':', '-.'][colors.count(color) % 4] # of one encoding's variants
        x, mean, half = np.array([(x, c['mean'], c['half'] if c['n'] > 2 else np.nan) for x, c in points]).T
        x = x * (1 + .02 * (n - (len(curves) - 1) / 2)) # bars of one length side by side
        ax.plot(x, mean, color=color, ls=style, marker='o', ms=4, clip_on=False)
        ax.errorbar(x, mean, half, color=color, ls='', lw=1, capsize=2)
        seen += [*mean]
        ends.append((mean[-1], name, color))
        colors.append(color)
    if level is not None: # chance, or the baseline of a difference
        ax.axhline(level, color='#888888', lw=1, ls='--')
        seen.append(level)
        ends.append((level, word, '#666666'))

    # names at the ends, moved up where they would overlap; bars may leave the limits
    room = .06 * (max(seen) - min(seen)) + 1e-3
    low, high, height = min(seen) - room, min(max(seen) + room, top), -1
    for end, name, color in sorted(ends):
        height = max(height + .055, (end - low) / (high - low))
        ax.text(1.02, height, name.replace('$', r'\$'), transform=ax.transAxes, va='center', color=color)
    ticks = sorted({x for points in curves.values() for x, _ in points})
    if xlabel == LENGTH:
        ax.axvline(1, color='#888888', lw=1, ls=':')
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale='log', ylim=(low, high))
    ax.set_xticks(ticks, [f'{x:g}' for x in ticks])
    ax.minorticks_off()
    ax.set_title(heading.replace('$', r'\$'), fontsize=10, loc='left')
    ax.spines[['top', 'right']].set_visible(False)
    save_figure(fig, path)
    plt.close(fig)

LENGTH = 'context length / training length (dotted: as trained)'

def figures(path, panels, chosen):
    """One for each panel, or one over all: what was asked for, else baseline and best of each kind."""
    stem, pictures = path.removesuffix('.csv'), {}
    for panel, encodings in panels.items():
        base = base_of(encodings)
        best = {kind_of(name): name for name in reversed(encodings)}
        shown = [name for name in encodings if name in (chosen or [base, *best.values()])]
        key = '' if figure in RUN else panel
        for name in sorted(shown, key=lambda name: name != base)[:7]:
            group = encodings[name]
            points = [(T / group.L, cell) for T, cell in group.cells.items()]
            if figure in RUN: # a point for each panel, at the longest context
                points = [(float(group.row[figure]), cell) for _, cell in points[-1:]]
            if figure != 'value':
                points = [(x, cell['difference']) for x, cell in points if 'difference' in cell]
            row, base, curves = pictures.setdefault(key, (group.row, base, {}))
            if points:
                curves[name] = sorted(curves.get(name, []) + points, key=lambda point: point[0])

    drawn = []
    for panel, (row, base, curves) in pictures.items():
        cells = [cell for points in curves.values() for _, cell in points]
        if not cells or len(drawn) == 20: # nobody looks at more
            continue
        label, sign, *_ = METRICS[row['metric']]
        few, many = min(cell['n'] for cell in cells), max(cell['n'] for cell in cells)
        level, word, top = getattr(TASKS.get(row['dataset']), 'chance', None), 'chance', math.inf
        if figure != 'value':
            level, word, label = 0, base, f'{label} minus that of {base}'
        elif sign > 0 and max(cell['mean'] for cell in cells) <= 1:
            top = 1 # a share has no more
        heading = title or f"{label} by {figure if figure in RUN else 'context length'}"
        heading = textwrap.fill(heading, 90)
        heading += f"\n{panel or row['note']}; {few if few == many else f'{few} to {many}'} seeds"
        heading += ', 95% intervals' if many > 2 else ''
        file = '_'.join([stem, *re.findall(r'[\w.+-]+', panel)]) + '.png'
        ylabel = textwrap.fill(f"{label} ({'higher' if sign > 0 else 'lower'} is better)", 40)
        draw(file, curves, heading, figure if figure in RUN else LENGTH, ylabel, level, word, top)
        drawn.append(file)
    return drawn

# -----------------------------------------------------------------------------

def report_on(path, chosen=()):
    panels = read(path)
    count, known = compare(panels), sorted({name for encodings in panels.values() for name in encodings})
    panels = {panel: best_first(encodings) for panel, encodings in panels.items()}
    chosen = [name if name in known else label_of(name) for name in chosen]
    asked = [('pos', name) for name in chosen]
    if 'baseline' in typed() and not any(map(base_of, panels.values())):
        asked.append(('baseline', baseline))
    for flag, name in asked if report else []: # after runs whatever they gave is shown
        if name not in known:
            usage(f"--{flag}={name}: not in {path}, which has {', '.join(known)}")

    # X.md has everything, the terminal what was asked for
    stem = path.removesuffix('.csv')
    page = [f"# {markdown(title or os.path.basename(path))}", '']
    page += ['    ' + shlex.join(['python', 'ablate.py', *sys.argv[1:]])]
    for panel, encodings in panels.items():
        lengths = sorted({T for group in encodings.values() for T in group.cells})
        page += ['', f'## {markdown(panel)}'] if panel else []
        page += ['', *as_markdown(table(encodings, lengths))]
        shown = {name: group for name, group in encodings.items() if not chosen or name in chosen}
        if shown:
            print(f'\n{panel}' if panel else '')
            as_text(table(shown, lengths[-1:]))
        if not base_of(encodings):
            print(f"note: no rows of the baseline {baseline!r} here; there are {', '.join(encodings)}")
    for line in caption(path, panels, count):
        page += ['', markdown(line)]
        print('\n' + textwrap.fill(line, 98))
    try:
        with open(f'{stem}.md', 'w', encoding='utf-8') as f:
            f.write('\n'.join(page) + '\n')
    except OSError as e:
        fail(f"{stem}.md cannot be written ({e.strerror})")
    drawn = figures(path, panels, chosen) if plot and find_spec('matplotlib') else []
    print('written:', ', '.join([f'{stem}.md', *drawn]))

    # one JSON object: six digits, null for what is not known
    summary = {}
    for panel, encodings in panels.items():
        summary[panel] = {name: {'seeds': sorted(g.seeds)} | g.cells for name, g in encodings.items()}
    summary = dict(report=os.path.basename(path), baseline=baseline, comparisons=count, panels=summary)
    print(json.dumps(json.loads(json.dumps(summary), parse_float=lambda x: float(f'{float(x):.6g}'),
                                parse_constant=lambda _: None)))

# -----------------------------------------------------------------------------

if __name__ == '__main__': # the tests import the functions above
    files = [a for a in sys.argv[1:] if not a.startswith('-')]
    mine = [a for a in sys.argv[1:] if a.startswith('-') and a.lstrip('-').partition('=')[0] in OWN]
    theirs = [a for a in sys.argv[1:] if a not in files + mine]
    configure(globals(), {'x >= 1': 'jobs', 'len(x) >= 1': 'seeds tune_seeds', "x != ''": 'out_dir',
                          'all(0 <= s <= 10**9 for s in x)': 'seeds tune_seeds',
                          'all(r > 0 for r in x)': 'learning_rate',
                          f"x in {['value', 'difference', *RUN[3:11]]}": 'figure'}, argv=mine)
    specs = [spec.strip() for spec in pos.split(',') if spec.strip()]
    if not find_spec('scipy'):
        usage("the report needs scipy: pip install scipy")
    if report:
        if files or theirs:
            usage(f"{(files + theirs)[0]}: --report takes no config file and no setting of train.py")
        of_runs = 'seeds jobs learning_rate tune_seeds out_dir results'.split()
        if given := [k for k in typed() if k in of_runs]:
            usage(f"--{given[0]}: belongs to runs; a report shows all that the csv has")
        report_on(os.path.join(report, 'results.csv') if os.path.isdir(report) else report, specs)
        sys.exit()

    # what can be refused without train.py
    if not specs:
        usage("expected --pos=a,b,c (or --report=results.csv); --help shows examples")
    given = [(f'--{k}', k) for k in typed() if k not in OWN]
    for spec in specs:
        given += [(f'--pos={spec}', word.partition('=')[0].lstrip('-')) for word in spec.split(':')[1:]]
    for where, key in given:
        name = where if where == f'--{key}' else f'{where}: {key}'
        if key in NO_TRAINING:
            usage(f"{name}: a grid trains; give another --out_dir for other settings")
        if key in (*SET_BY_GRID, 'out_dir', 'results', 'pos'):
            usage(f"{name}: a grid sets that for each run, from --pos= and --seeds=")
    labels = tuple(label_of(spec) for spec in specs)
    lists = dict(pos=labels, seeds=seeds, tune_seeds=tune_seeds, learning_rate=learning_rate)
    for name, values in lists.items():
        if len(set(values)) < len(values):
            usage(f"--{name}: {max(values, key=values.count)} stands there twice")
    if len(learning_rate) > 1:
        if rated := [spec for spec in specs if ':learning_rate=' in spec]:
            usage(f"--pos={rated[0]}: has a learning rate of its own, and --learning_rate= would tune it")
        if both := sorted({*seeds} & {*tune_seeds}):
            usage(f"--tune_seeds: {both[0]} is among --seeds, but a rate chosen on a seed flatters it")
    else:
        theirs += [f'--learning_rate={rate}' for rate in learning_rate]

    # the runs, seed by seed: a table early on
    results = results or os.path.join(out_dir, 'results.csv')
    check_results(results)
    signals = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)]
    usual = {number: signal.getsignal(number) for number in signals}
    for number, handler in usual.items():
        signal.signal(number, on_signal if handler != signal.SIG_IGN else handler) # nohup ignores SIGHUP
    check(specs)
    best = tuned(specs) if len(learning_rate) > 1 else {}
    run_grid([(spec, seed, best.get(spec)) for seed in seeds for spec in specs], results)
    for number, handler in usual.items():
        signal.signal(number, handler)
    report_on(results)
