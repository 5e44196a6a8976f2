"""
Encodings x seeds of one config, and the table and figure of what came out.

    python ablate.py config/synth_jordan.py --pos=rope,rope_hi,jordan_stabilized --seeds=0,1,2
    python ablate.py config/synth_jordan.py --pos=damped,damped:pos_c=1   # settings of one encoding after ':'
    python ablate.py config/synth_jordan.py --pos=rope,damped --learning_rate=3e-4,1e-3,3e-3   # tune it first
    python ablate.py --report=results/synth.csv                           # table and figure once more
    python ablate.py --report=results/synth.csv --pos='rope,damped c=1' --figure=difference    # of some

Runs train.py once per encoding and seed; flags that are not its own go to train.py. What results.csv already holds is
skipped, what a Ctrl-C cut off goes on where it stopped. The report needs the csv alone: X.csv gives X.md, which has
every encoding and length, and X.png. Its last line is one JSON object.
"""

import importlib.util
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

from configurator import ROOT, configure, usage # before torch: it makes Ctrl-C one line

import numpy as np

from common import COLORS, fail, pyplot, save_figure
from runs import check_results, read_rows
from tasks import METRICS, TASKS

# -----------------------------------------------------------------------------
pos = '' # encodings to run: rope,damped:pos_c=1,jordan_stabilized:pos_eta0=.5; of a report those to show, '' is all
seeds: tuple[int, ...] = (0, 1, 2)
jobs = 1 # runs at the same time; give each its threads with OMP_NUM_THREADS
learning_rate: tuple[float, ...] = () # several: each encoding takes the best by validation loss on tune_seeds
tune_seeds: tuple[int, ...] = (1000,) # never reported
out_dir = 'out-ablate' # a folder per run
results = '' # csv; '' is results.csv in out_dir
report = '' # only report on this csv
baseline = 'rope' # what every encoding is compared with, seed by seed
plot = True # draw the figure
figure = 'value' # 'difference' to the baseline; or a column (attn_temperature): the difference at the far end, by that
title = '' # of table and figure; '' says what is compared
# -----------------------------------------------------------------------------

OWN = 'pos seeds jobs learning_rate tune_seeds out_dir results report baseline plot figure title h help'.split()

# -----------------------------------------------------------------------------
# run

children, caught = set(), []

def on_signal(number, frame=None):
    """Ctrl-C, SIGTERM or a closed terminal: every train.py gets it too, and saves. A second one ends them at once."""
    caught.append(number)
    for child in list(children):
        child.send_signal(number)

def stop():
    with suppress(OSError): # the terminal may be gone
        print(f"ablate.py: stopped by {signal.Signals(caught[0]).name}; the same command goes on where it was", file=sys.stderr)
    sys.exit(128 + caught[0])

def label_of(spec, rate=None):
    """'damped:pos_c=.1' -> 'damped c=0.1', the name of its rows in every table; a tuned learning rate belongs to it."""
    words = spec.split(':') + ([] if rate is None else [f'learning_rate={rate}'])
    for n, word in enumerate(words):
        key, equals, value = word.partition('=')
        with suppress(ValueError):
            value = f'{float(value):.9g}'
        words[n] = key.removeprefix('pos_') + equals + value
    return ' '.join(words)

def train(spec, seed, rate, csv, how):
    """One train.py in a folder of its own, resumed if it was cut off: (the last line of its output, what went wrong)."""
    label = label_of(spec, rate)
    folder = os.path.join(out_dir, re.sub(r'[^\w.+=-]', '_', f'{label}_s{seed}'))
    name, *settings = spec.split(':')
    settings += [] if rate is None else [f'learning_rate={rate}']
    settings += [f'label={label}', f'seed={seed}', f'out_dir={folder}', f'results={csv}', 'json=True', how]
    if how == 'skip_done=True' and os.path.exists(os.path.join(folder, 'ckpt.pt')):
        settings.append('init_from=resume')
    command = [os.path.join(ROOT, 'train.py'), *files, *theirs, f'--pos={name}', *(f'--{s}' for s in settings)]

    # in a session of its own: a Ctrl-C of the terminal reaches it once, through on_signal. Where this process is killed,
    # the pipe closes: it saves and ends at the next line that it prints
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
        return '', f"{(err.strip().splitlines() or ['no word'])[-1]}\n  status {child.returncode} of {shlex.join(command)}"
    return out.strip().splitlines()[-1], ''

def run_grid(grid, csv, how='skip_done=True'):
    """[(spec, seed, rate)] -> the validation loss of each, `jobs` at a time, with progress and ETA over the whole grid."""
    start, losses, failed = time.monotonic(), [], []
    with ThreadPoolExecutor(jobs) as pool:
        for n, (last, error) in enumerate(pool.map(lambda run: train(*run, csv, how), grid), 1):
            failed += [error] if error else []
            losses.append(math.nan if error else float(json.loads(last)['val_loss']))
            left = timedelta(seconds=round((time.monotonic() - start) / n * (len(grid) - n)))
            spec, seed, rate = grid[n - 1]
            try:
                print(f"[{n}/{len(grid)}] {label_of(spec, rate)} seed={seed}: "
                      f"{'FAILED' if error else f'val loss {losses[-1]:.4f}'}, ETA {left}", flush=True)
            except OSError: # nobody reads this any more
                on_signal(signal.SIGTERM)
            if caught:
                break
    if caught:
        stop()
    if failed:
        fail(f"{len(failed)} of {len(grid)} runs failed, the rest is in {csv}; the first: {failed[0]}")
    return losses

def check(specs):
    """train.py as far as its model, once per encoding: what it would refuse is said before anything runs."""
    with ThreadPoolExecutor(jobs) as pool:
        for _, error in pool.map(lambda spec: train(spec, seeds[0], None, results, 'dry_run=True'), specs):
            if error and not caught:
                usage(error.splitlines()[0])

def tuned(specs):
    """{spec: its learning rate with the best mean validation loss over tune_seeds}. These rows have a csv of their own."""
    grid = [(spec, seed, rate) for spec in specs for rate in learning_rate for seed in tune_seeds]
    losses = np.reshape(run_grid(grid, results.removesuffix('.csv') + '_tune.csv'), (len(specs), len(learning_rate), -1))
    best = {}
    for spec, mean in zip(specs, losses.mean(axis=2)):
        best[spec] = learning_rate[mean.argmin()]
        tried = ', '.join(f'{rate:g} ({loss:.4f})' for rate, loss in zip(learning_rate, mean))
        print(f"{spec}: learning rate {best[spec]:g} of {tried}")
    return best

# -----------------------------------------------------------------------------
# statistics. The unit is a training seed: its test rows are new, and the same for every encoding, so that the paired
# interval over seeds covers the error of the rows

def t_interval(samples):
    """Of each sample the mean, the half width of its 95% t interval, and p of a mean of 0; nan for one value alone."""
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
    """better or worse (by the adjusted p), level (within the metric's margin) or undecided; no word below three seeds."""
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
    dataset note metric n_layer n_head n_embd attn_temperature block_size batch_size max_iters learning_rate weight_decay
    dtype data_checksum run_hash
'''.split()
RATE = RUN.index('learning_rate')

def names(columns, settings):
    """{setting: 'n_layer=2 weight_decay=0.1'}: the columns that tell it from the others, if those before do not."""
    told, parts = {setting: () for setting in settings}, 1
    for n, column in enumerate(columns):
        key = column.removeprefix('pos_').removesuffix('_hash')
        finer = {s: (*words, f"{key}={s[n]!r}" if ' ' in s[n] else f"{key}={s[n]}") for s, words in told.items()}
        if len(set(finer.values())) > parts:
            told, parts = finer, len(set(finer.values()))
    return {s: ' '.join(word for word in words if not word.endswith('=')) for s, words in told.items()}

def read(path):
    """
    A csv as {panel: {encoding: group}}. A group has the rows of one setting: seeds={seed: {T: value}}, its last row, and
    that one's lengths={T: [value, lo, hi, n]}. Rows that differ in any setting or hash are never in one group.
    """
    groups = {}
    for row in read_rows(path):
        try:
            seed, lengths = int(row['seed']), {int(T): v for T, v in json.loads(row['metrics']).items()}
            sound = all(len(v) == 4 and all(map(math.isfinite, v)) for v in lengths.values())
            sound = sound and min(*lengths, int(row['block_size'])) > 0 and row['metric'] in METRICS
        except (ValueError, TypeError):
            sound = False
        if not sound:
            fail(f"{path}: the row of label={row['label']!r} seed={row['seed']!r} is damaged; take it out")
        columns = [k for k in row if k.startswith('pos') and k != 'pos_params'] + ['config_hash']
        run, own = (tuple(row[k].removesuffix('.0') for k in keys) for keys in (RUN, columns))
        if ' learning_rate=' in row['label']: # tuned for this encoding
            run = (*run[:RATE], '', *run[RATE + 1:])
        group = groups.setdefault((run, row['label'], own), {'seeds': {}})
        group['seeds'][seed] = {T: v[0] for T, v in lengths.items()} # the last row of a seed counts
        group |= {'row': row, 'lengths': lengths}
    if not groups:
        fail(f"{path}: no such file, or no rows of train.py in it; ablate.py without --report makes one")

    # where all others share one rate, those that were tuned are compared with them
    panels, one_rate = {}, len({run[RATE] for run, _, _ in groups} - {''}) < 2
    for (run, label, own), group in groups.items():
        run = (*run[:RATE], '' if one_rate else run[RATE], *run[RATE + 1:])
        panels.setdefault(run, {}).setdefault(label, {})[own] = group
    panel_of, named = names(RUN, panels), {}
    for run, labels in panels.items():
        encodings = named[panel_of[run]] = {}
        for label, variants in labels.items():
            for own, name in names(columns, variants).items():
                name = f'{label} {name}'.strip()
                encodings[name if name not in encodings else f'{name} config={own[-1]}'] = variants[own]
    return named

def base_of(encodings):
    """The baseline's name among these, perhaps with the rate that was tuned for it; '' if it is not there."""
    tuned = [name for name in encodings if name.startswith(f'{baseline} learning_rate=')]
    return baseline if baseline in encodings else tuned[0] if len(tuned) == 1 else ''

def compare(panels):
    """
    Gives every group cells={T: {n, mean, half, difference}}: what is known at a length, and the difference to the baseline
    over the seeds that both have; p is adjusted for all of the csv. The best come first. Returns how many were compared.
    """
    cells, pairs = [], []
    for encodings in panels.values():
        base = encodings.get(base_of(encodings))
        for group in encodings.values():
            group['cells'] = {T: {} for T in sorted({T for values in group['seeds'].values() for T in values})}
            for T, cell in group['cells'].items():
                at = {seed: values[T] for seed, values in group['seeds'].items() if T in values}
                cells.append((cell, [*at.values()]))
                if base and group is not base:
                    both = [seed for seed in at if T in base['seeds'].get(seed, {})]
                    d = [at[seed] - base['seeds'][seed][T] for seed in both]
                    pairs += [(cell, d, group['row']['metric'])] if d else []
    for (cell, x), mean, half, _ in zip(cells, *t_interval([x for _, x in cells])):
        cell |= dict(n=len(x), mean=mean, half=half)
    mean, half, p = t_interval([d for _, d, _ in pairs])
    adjusted, known = p.copy(), ~np.isnan(p)
    adjusted[known] = adjust(p[known])
    for (cell, d, metric), *values in zip(pairs, mean, half, p, adjusted):
        cell['difference'] = dict(zip(('mean', 'half', 'p', 'adjusted_p'), values), n=len(d))
        cell['difference']['verdict'] = verdict(values[0], values[1], values[3], len(d), metric)

    for panel, encodings in panels.items():
        far = max(T for group in encodings.values() for T in group['cells'])
        best = [(-METRICS[g['row']['metric']][1] * g['cells'].get(far, {}).get('mean', math.nan), name) for name, g in encodings.items()]
        panels[panel] = {name: encodings[name] for _, name in sorted(best, key=lambda b: (math.isnan(b[0]), b))}
    return int(known.sum())

# -----------------------------------------------------------------------------
# report: tables

def plus_minus(x, sign=''):
    """0.982 ±0.009, of a cell or of its difference."""
    return f"{x['mean']:{sign}.3f}" + (f" ±{x['half']:.3f}" if x['n'] > 1 else '')

def compared(cell):
    """[difference, p, adjusted p, verdict] in words."""
    if 'difference' not in cell:
        return ['n/a'] * 4
    d = cell['difference']
    p, adjusted = ('n/a' if math.isnan(p) else '<.001' if p < .001 else f'{p:.3f}' for p in (d['p'], d['adjusted_p']))
    return [plus_minus(d, '+'), p, adjusted, d['verdict']]

def print_table(encodings, base, far):
    """The longest context alone, in 100 columns; a long name has a line of its own."""
    L = int(next(iter(encodings.values()))['row']['block_size'])
    print(f"{'encoding':36}  {'n':>3}  {f'{far / L:g}L':>12}  {'difference':>13}  {'p':>5}  {'adj.':>5}  verdict")
    for name, group in encodings.items():
        cell = group['cells'].get(far)
        value = plus_minus(cell) if cell else 'n/a'
        difference, p, adjusted, word = compared(cell or {}) if name != base else ('', '', '', 'baseline')
        name = name if len(name) <= 36 else textwrap.fill(name, 100) + '\n' + ' ' * 36
        print(f"{name:36}  {len(group['seeds']):3}  {value:>12}  {difference:>13}  {p:>5}  {adjusted:>5}  {word}")

def markdown(text):
    return re.sub(r'([\\|*<>`$\[\]])', r'\\\1', ' '.join(text.split()))

def markdown_table(encodings):
    """Every length: the metric, below it the difference to the baseline, its verdict and both p."""
    L = int(next(iter(encodings.values()))['row']['block_size'])
    lengths = sorted({T for group in encodings.values() for T in group['cells']})
    lines = [['encoding', 'parameters', 'n', *(f'{T / L:g}L' for T in lengths)], ['---'] * (3 + len(lengths))]
    for name, group in encodings.items():
        line = [markdown(name), f"{int(group['row']['params']):,}", str(len(group['seeds']))]
        for T in lengths:
            cell = group['cells'].get(T)
            line.append(plus_minus(cell) if cell else 'n/a')
            if cell and cell['n'] == 1:
                line[-1] += ' ({:.3f} to {:.3f})'.format(*group['lengths'][T][1:3])
            if cell and 'difference' in cell:
                difference, p, adjusted, word = compared(cell)
                line[-1] += markdown(f'{difference} {word} ({p}, {adjusted})').join(['<br>', ''])
        lines.append(line)
    return [f"| {' | '.join(line)} |" for line in lines]

def caption(path, panels, count):
    """What the numbers are."""
    groups = [group for encodings in panels.values() for group in encodings.values()]
    metrics = sorted({group['row']['metric'] for group in groups})
    scored = sorted({v[3] for group in groups for v in group['lengths'].values()})
    words = [f"{' and '.join(METRICS[m][0] for m in metrics)}: mean over n seeds ± 95% t interval (one seed: interval of "
             f"its {' or '.join(f'{n:,}' for n in scored)} rows or windows).",
             f"difference: to {baseline}, paired by seed; p of a t test, and adjusted (Benjamini-Hochberg) for the {count} "
             f"comparisons of {os.path.basename(path)}.",
             "better, worse: adjusted p < .05; level: the interval lies within "
             f"{' and '.join(f'±{METRICS[m][2]:g}' for m in metrics)}; else undecided; no verdict below n = 3."]
    files = sorted({f"{g['row']['dataset']} ({g['row']['data_checksum']})" for g in groups if g['row']['data_checksum']})
    return words + [f"The data are a file, {' and '.join(files)}: every interval is conditional on it."] * bool(files)

# -----------------------------------------------------------------------------
# report: figures

def draw(path, curves, heading, xlabel, ylabel, level=None, word='', top=math.inf):
    """{name: [(x, {mean, half, n})]} as lines with their names at the end; a band is a 95% interval of three seeds or more."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7.5, 4.3), layout='constrained')
    names, ends = list(curves), []
    for name, points in curves.items():
        kind = name.split()[0]
        color = COLORS.get(kind, COLORS.get(kind.partition('+')[0], '#444444'))
        variant = [n for n in names if n.split()[0] == kind].index(name)
        x, mean, half = np.array([(x, y['mean'], y['half'] if y['n'] > 2 else np.nan) for x, y in sorted(points, key=lambda p: p[0])]).T
        ax.plot(x, mean, color=color, ls=['-', '--', ':', '-.'][variant % 4], marker='o', ms=4, clip_on=False)
        ax.fill_between(x, mean - half, np.minimum(mean + half, top), color=color, alpha=.1, lw=0)
        ends.append((mean[-1], name, color))

    # what is measured decides the limits, bands may leave them
    seen = [y['mean'] for points in curves.values() for _, y in points] + ([] if level is None else [level])
    room = .06 * (max(seen) - min(seen)) + 1e-3
    low, high = min(seen) - room, min(max(seen) + room, top)
    ticks = sorted({x for points in curves.values() for x, _ in points})
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale='log', ylim=(low, high))
    ax.set_xticks(ticks, [f'{x:g}' for x in ticks])
    ax.minorticks_off()
    if level is not None:
        ax.axhline(level, color='#888888', lw=1, ls='--')
        ax.annotate(word, (.01, level), xycoords=('axes fraction', 'data'), va='bottom', color='#666666', fontsize=8)

    # names at the ends, moved up where they would overlap
    height = -1
    for end, name, color in sorted(ends):
        height = max(height + .055, (end - low) / (high - low))
        ax.annotate(name.replace('$', r'\$'), (1.02, height), xycoords='axes fraction', va='center', color=color, fontsize=9)
    ax.set_title(heading.replace('$', r'\$'), fontsize=10, loc='left')
    ax.spines[['top', 'right']].set_visible(False)
    save_figure(fig, path)
    plt.close(fig)
    return os.path.basename(path)

def figures(path, panels, chosen):
    """A figure per panel, or one over all of them, of at most seven: those asked for, or the baseline and the best."""
    drawn, stem, over = [], path.removesuffix('.csv'), {}
    for panel, encodings in panels.items():
        base = base_of(encodings)
        shown = [name for name in encodings if name in chosen] or [base] * bool(base) + [name for name in encodings if name != base]
        row = encodings[shown[0]]['row']
        label, sign, _ = METRICS[row['metric']][:3]
        better = f"{'higher' if sign > 0 else 'lower'} is better"
        curves = {}
        for name in shown[:7]:
            cells = encodings[name]['cells']
            if figure in RUN and 'difference' in cells[max(cells)]:
                over.setdefault(name, []).append((float(row[figure]), cells[max(cells)]['difference']))
            curves[name] = [(T / int(row['block_size']), cell if figure == 'value' else cell['difference'])
                            for T, cell in cells.items() if figure == 'value' or 'difference' in cell]
        curves = {name: points for name, points in curves.items() if points}
        seeds = sorted({len(encodings[name]['seeds']) for name in shown[:7]})
        where = f"{panel or row['note']}; {'-'.join(map(str, {seeds[0]: 0, seeds[-1]: 0}))} seeds"
        if figure in RUN or not curves:
            continue
        file = '_'.join([stem, *re.findall(r'[\w.+-]+', panel)]) + '.png'
        xlabel = 'context length in training lengths (1: as trained)'
        if figure == 'difference':
            heading = title or f"{label}: difference to {base}"
            drawn.append(draw(file, curves, f"{heading}\n{where}", xlabel, f"{label} - {base} ({better})", 0, base))
        else:
            heading = title or f"{label} by context length: {len(curves)} of {len(encodings)} encodings"
            top = 1 if sign > 0 and max(y['mean'] for points in curves.values() for _, y in points) <= 1 else math.inf
            drawn.append(draw(file, curves, f"{heading}\n{where}", xlabel, f"{label} ({better})",
                              getattr(TASKS.get(row['dataset']), 'chance', None), 'chance', top))
    if over:
        drawn.append(draw(f'{stem}.png', over, f"{title or f'{label}: difference to {baseline} at the longest context'}",
                          figure, f'{label} - {baseline} ({better})', 0, baseline))
    return drawn

# -----------------------------------------------------------------------------

def rounded(x):
    """For JSON: six digits, null for what is not known."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, float):
        return None if math.isnan(x) else float(f'{x:.6g}')
    return x

def report_on(path, chosen=()):
    panels = read(path)
    count, known = compare(panels), sorted({name for encodings in panels.values() for name in encodings})
    nowhere = not any(map(base_of, panels.values()))
    for flag, name in [('pos', name) for name in chosen] + [('baseline', baseline)] * (nowhere and baseline != 'rope'):
        if report and name not in known: # after runs it is a note
            usage(f"--{flag}={name}: not in {path}, which has {', '.join(known)}")

    # X.md has everything
    stem = path.removesuffix('.csv')
    text = [f"# {markdown(title or os.path.basename(path))}", '', f"    {shlex.join(['python', 'ablate.py', *sys.argv[1:]])}", '']
    for panel, encodings in panels.items():
        text += [f'## {markdown(panel)}', ''] * bool(panel) + markdown_table(encodings) + ['']
    text += map(markdown, caption(path, panels, count))
    try:
        with open(f'{stem}.md', 'w', encoding='utf-8') as f:
            f.write('\n'.join(text) + '\n')
    except OSError as e:
        fail(f"{stem}.md cannot be written ({e.strerror})")
    drawn = figures(path, panels, chosen) if plot and importlib.util.find_spec('matplotlib') else []

    # the terminal what was asked for
    for panel, encodings in panels.items():
        shown = {name: group for name, group in encodings.items() if not chosen or name in chosen}
        if shown:
            print(f'\n{panel}' if panel else '')
            print_table(shown, base_of(encodings), max(T for group in encodings.values() for T in group['cells']))
        if not base_of(encodings):
            print(f"note: no rows of the baseline {baseline!r} here, so nothing is compared; "
                  f"--baseline= may be one of {', '.join(encodings)}")
    for line in ['', *caption(path, panels, count), f"written: {', '.join([f'{stem}.md', *drawn])}"]:
        print(textwrap.fill(line, 98))
    summary = {panel: {name: {'seeds': sorted(group['seeds'])} | group['cells'] for name, group in encodings.items()}
               for panel, encodings in panels.items()}
    print(json.dumps(rounded({'report': os.path.basename(path), 'baseline': baseline, 'comparisons': count, 'panels': summary})))

# -----------------------------------------------------------------------------

if __name__ == '__main__': # the tests import the functions above
    files = [a for a in sys.argv[1:] if not a.startswith('-')]
    theirs = [a for a in sys.argv[1:] if a.startswith('-') and a.lstrip('-').partition('=')[0] not in OWN]
    configure(globals(), {'x >= 1': 'jobs', 'len(x) >= 1': 'seeds tune_seeds', "x != ''": 'out_dir',
                          f"x in {['value', 'difference', *RUN]}": 'figure'},
              argv=[a for a in sys.argv[1:] if a not in files + theirs])
    specs = [spec.strip() for spec in pos.split(',') if spec.strip()]
    if report:
        if files or theirs:
            usage(f"{(files + theirs)[0]}: --report takes no config file and none of train.py's settings; it reads {report}")
        report_on(os.path.join(report, 'results.csv') if os.path.isdir(report) else report, specs)
        sys.exit()

    # what can be refused without train.py
    if not files or not specs:
        usage("expected a config file and --pos=a,b,c (or --report=results.csv); --help shows examples")
    for flag in theirs:
        if flag.partition('=')[0] in ('--seed', '--label', '--json', '--init_from', '--skip_done', '--dry_run'):
            usage(f"{flag}: a grid sets that for each run" + ('; it has --seeds=0,1,2' if flag.startswith('--seed=') else ''))
    labels = [label_of(spec) for spec in specs]
    for name, values in (('pos', labels), ('seeds', seeds), ('tune_seeds', tune_seeds), ('learning_rate', learning_rate)):
        if len(set(values)) < len(values):
            usage(f"--{name}: {max(values, key=values.count)} stands there twice")
    if len(learning_rate) > 1:
        if own_rate := [spec for spec in specs if ':learning_rate=' in spec]:
            usage(f"--pos={own_rate[0]}: has a learning rate of its own, and --learning_rate= would tune it")
        if both := sorted({*seeds} & {*tune_seeds}):
            usage(f"--tune_seeds: {both[0]} is among --seeds, but a rate chosen on a seed flatters it; give others")

    # the runs, seed by seed: a table early on
    results = results or os.path.join(out_dir, 'results.csv')
    theirs += [f'--learning_rate={rate}' for rate in learning_rate if len(learning_rate) == 1]
    signals = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)]
    usual = {number: signal.getsignal(number) for number in signals if signal.getsignal(number) != signal.SIG_IGN}
    for number in usual: # nohup ignores SIGHUP
        signal.signal(number, on_signal)
    check_results(results)
    check(specs)
    best = tuned(specs) if len(learning_rate) > 1 else {}
    run_grid([(spec, seed, best.get(spec)) for seed in seeds for spec in specs], results)
    for number in usual:
        signal.signal(number, usual[number])
    report_on(results)
