"""
Encodings x seeds of one config, and the table and figure of what came out.

    python ablate.py config/synth_jordan.py --pos=rope,rope_hi,jordan_stabilized --seeds=0,1,2
    python ablate.py config/synth_jordan.py --pos=damped,damped:pos_c=1 --seeds=0,1,2 --weight_decay=0.1   # settings of one encoding after ':'
    python ablate.py config/synth_jordan.py --pos=rope,damped --learning_rate=3e-4,1e-3,3e-3   # first tune it, on seeds not reported
    python ablate.py --report=results/synth.csv                                        # table and figure; of some: --pos='rope,damped c=1'

Runs train.py once per encoding and seed; flags that are not its own go to train.py. What results.csv already holds is skipped, what a
Ctrl-C cut off goes on where it stopped. The report needs the csv alone. Its last stdout line is one JSON object.
"""

import os
import re
import sys
import json
import math
import time
import datetime
import subprocess
from concurrent.futures import ThreadPoolExecutor

from configurator import configure, usage # before torch: it makes Ctrl-C one line

import numpy as np

from common import COLORS, fail, read_rows, row_label, save_figure, unpack
from model import GPTConfig, make_pos

# -----------------------------------------------------------------------------
pos = '' # encodings, each perhaps with settings of its own: rope,damped:pos_c=1,jordan_stabilized:pos_eta0=.01:pos_eta_max=.05; of a report those to show, '' is all
seeds: tuple[int, ...] = (0, 1, 2)
jobs = 1 # runs at the same time; give each its threads with OMP_NUM_THREADS
learning_rate: tuple[float, ...] = () # several: each encoding takes the best of them by validation loss on tune_seeds
tune_seeds: tuple[int, ...] = (1000,) # never reported
out_dir = 'out-ablate' # a folder per run
results = '' # csv; '' is results.csv in out_dir
report = '' # only report on this csv
baseline = 'rope' # what every encoding is compared with, row by row and seed by seed
plot = True # write the figure beside the csv, if matplotlib is installed
markdown = False # print the table as Markdown
# -----------------------------------------------------------------------------
own = 'pos seeds jobs learning_rate tune_seeds out_dir results report baseline plot markdown h help'.split()
is_own = lambda flag: flag.lstrip('-').partition('=')[0] in own
flags, files = [a for a in sys.argv[1:] if a.startswith('-')], [a for a in sys.argv[1:] if not a.startswith('-')]
configure(globals(), {'x >= 1': 'jobs', 'len(x) >= 1': 'seeds tune_seeds', "x != ''": 'out_dir'}, argv=[f for f in flags if is_own(f)])
theirs = [f for f in flags if not is_own(f)]

# -----------------------------------------------------------------------------
# run

def start_run(spec, seed, *more, results):
    """One train.py, in a folder of its own; resumed if it was cut off, nothing to do if its row is there. Its last line as a dict."""
    name, *settings = spec.split(':')
    folder = re.sub(r'[^\w.+=-]', '_', '_'.join([spec, f's{seed}', *more])).replace('--', '')
    folder = os.path.join(out_dir, folder)
    command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train.py'), *files, *theirs, *more, f'--pos={name}', *(f'--{s}' for s in settings),
               f'--seed={seed}', f'--out_dir={folder}', f'--results={results}', '--skip_done=True']
    if os.path.exists(os.path.join(folder, 'ckpt.pt')):
        command.append('--init_from=resume')
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'stdout.txt'), 'w', encoding='utf-8') as f:
        p = subprocess.run(command, stdout=f, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    with open(os.path.join(folder, 'stdout.txt'), encoding='utf-8') as f:
        lines = f.read().splitlines()
    if p.returncode or not lines:
        raise RuntimeError(f"{' '.join(command[1:])}\n  ended with status {p.returncode}: {(p.stderr.strip().splitlines() or ['no word'])[-1]}")
    return json.loads(lines[-1])

def run_grid(grid, results):
    """[(spec, seed, more flags)] -> their rows, `jobs` at a time, with progress and ETA over the whole grid."""
    start, rows, failed, real = time.time(), {}, [], 0
    def one(n):
        spec, seed, *more = grid[n]
        t = time.time()
        try:
            rows[n] = start_run(spec, seed, *more, results=results)
        except RuntimeError as e:
            failed.append(str(e))
        return n, time.time() - t
    with ThreadPoolExecutor(jobs) as pool:
        for done, (n, seconds) in enumerate(pool.map(one, range(len(grid))), 1):
            eta = datetime.timedelta(seconds=round((time.time() - start) / done * (len(grid) - done)))
            value = f"val loss {rows[n]['val_loss']:.4f}" if n in rows else 'FAILED'
            print(f"[{done}/{len(grid)}] {' '.join(map(str, grid[n]))}: {value}, {seconds:.0f} s, ETA {eta}", flush=True)
    if failed:
        fail(f"{len(failed)} of {len(grid)} runs failed, the rest is in {results}; the first:\n  {failed[0]}")
    return [rows[n] for n in range(len(grid))]

def tuned(specs, results):
    """Each encoding's best learning rate by mean validation loss over tune_seeds, as a flag; rows go to a csv of their own."""
    grid = [(s, seed, f'--learning_rate={lr}') for s in specs for lr in learning_rate for seed in tune_seeds]
    rows = run_grid(grid, results.removesuffix('.csv') + '_tune.csv')
    best = {}
    for s in specs:
        loss = {lr: np.mean([r['val_loss'] for g, r in zip(grid, rows) if g[0] == s and g[2] == f'--learning_rate={lr}']) for lr in learning_rate}
        best[s] = min(loss, key=loss.get)
        print(f"{s}: learning rate {best[s]:g} of " + ', '.join(f"{lr:g} ({v:.4f})" for lr, v in loss.items()))
    return {s: [f'--learning_rate={lr}'] for s, lr in best.items()}

# -----------------------------------------------------------------------------
# report

T975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131] # Student, df 1 ..

def interval(x):
    """Half width of the 95% t interval of the mean over seeds; nan for one seed."""
    n = len(x)
    return (T975[n - 2] if n - 2 < len(T975) else 1.96) * np.std(x, ddof=1) / math.sqrt(n) if n > 1 else math.nan

def row_test(a, b):
    """
    Do paired scores differ, pooled over seeds? Lists of arrays over the same rows or windows. McNemar's exact two-sided p for
    right/wrong; for bits per byte the share of bootstrap means (windows redrawn alike for every seed) on the wrong side of 0, doubled.
    """
    if a[0].dtype == bool:
        a, b = np.concatenate(a), np.concatenate(b)
        n10, n01 = int((a & ~b).sum()), int((~a & b).sum())
        n = n10 + n01
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(n10, n01) + 1)) / 2 ** n) if n else 1.0
    diff = np.mean([x - y for x, y in zip(a, b)], axis=0)
    means = diff[np.random.default_rng(0).integers(0, len(diff), (4000, len(diff)))].mean(axis=1)
    return min(1.0, 2 * min((means > 0).mean(), (means < 0).mean()) + 1 / 4000)

def measured(metrics):
    """The names of the figures at each length, acc_256 or bpb_256 and so on."""
    return [k for k in metrics if re.fullmatch(r'(acc|bpb)_\d+', k)]

def read(path):
    """The csv as {(encoding, run): {seed: row}}, a row's metrics and scores unpacked; the last row of a seed counts."""
    if not os.path.isfile(path):
        fail(f"{path}: no such file; ablate.py without --report makes one")
    rows = read_rows(path)
    if not rows:
        fail(f"{path}: holds no rows of train.py")
    if not all(r.get('pos', '').strip() and r.get('block_size', '').isdigit() and int(r['block_size']) for r in rows):
        fail(f"{path}: a row without pos or block_size is none of train.py; take it out")
    if len(lengths := sorted({r['block_size'] for r in rows}, key=int)) > 1:
        fail(f"{path}: holds runs of block_size {', '.join(lengths)}, which are no one table; give each study a --results of its own")
    table = {}
    for r, label in zip(rows, row_label(rows)):
        try:
            r['metrics'] = {k: float(v) for k, v in json.loads(r['metrics']).items()}
            r['scores'] = {k: unpack(v) for k, v in json.loads(r['scores']).items()}
            r['seed'], r['params'], r['wall_seconds'] = int(r['seed']), int(r['params']), float(r['wall_seconds'])
            keys = measured(r['metrics'])
            whole = r['scores'].keys() >= set(keys) and r['metrics'].keys() >= {k + end for k in keys for end in ('_lo', '_hi')}
            if not keys or not whole or not all(map(math.isfinite, r['metrics'].values())):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            fail(f"{path}: the row of pos={r.get('pos')} seed={r.get('seed')} is damaged; take it out")
        if keys != (before := measured(rows[0]['metrics'])):
            fail(f"{path}: holds runs that measured {', '.join(before)} and runs that measured {', '.join(keys)}, which are no one table; give each study an --out_dir of its own")
        table.setdefault(label, {})[r['seed']] = r
    return table

def compare(rows, base, key, sign):
    """(mean paired difference, half width, row-level p, verdict) against the baseline over the seeds that both have."""
    common = sorted(s for s in rows.keys() & base.keys() if len(rows[s]['scores'][key]) == len(base[s]['scores'][key])) # of the same rows
    d = np.array([rows[s]['metrics'][key] - base[s]['metrics'][key] for s in common])
    if not len(d) or rows is base:
        return math.nan, math.nan, math.nan, ''
    half = interval(d)
    p = row_test([rows[s]['scores'][key] for s in common], [base[s]['scores'][key] for s in common])
    sure = len(d) > 1 and abs(d.mean()) > half and p < .05
    return d.mean(), half, p, 'n=1' if len(d) == 1 else 'noise' if not sure else 'better' if d.mean() * sign > 0 else 'worse'

def print_table(lines):
    """Lists of cells, the head first, as text or Markdown."""
    width = [max(len(l[c]) for l in lines) for c in range(len(lines[0]))]
    for n, line in enumerate(lines):
        if markdown:
            print('| ' + ' | '.join(cell.replace('|', r'\|') for cell in line) + ' |' + ('\n|' + ' --- |' * len(line)) * (n == 0))
        else:
            print('  '.join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(line, width))))

def report_on(path, chosen=()):
    everything = read(path)
    names = sorted({encoding for encoding, _ in everything})
    asked = [('pos', e) for e in chosen] + [('baseline', baseline)] * any(f.startswith('--baseline=') for f in flags)
    for flag, e in asked if report else []: # after runs whatever they gave is shown
        if e not in names:
            usage(f"--{flag}={e}: not in {path}, which has {', '.join(names)}")
    table = {name: rows for name, rows in everything.items() if not chosen or name[0] in chosen}
    first = next(iter(next(iter(table.values())).values()))
    keys = measured(first['metrics'])
    sign = 1 if keys[0].startswith('acc') else -1 # of what is better
    L, far = int(first['block_size']), keys[-1]
    mean = lambda rows, k: np.mean([r['metrics'][k] for r in rows.values()])
    table = dict(sorted(table.items(), key=lambda t: (t[0][1], -sign * mean(t[1], far)))) # run by run, the best first
    if lacking := sorted({run for _, run in table} - {run for encoding, run in everything if encoding == baseline}):
        print(f"note: no rows of the baseline {baseline!r}" + f" at {'; '.join(lacking)}" * any(lacking) + f", so nothing is compared there; --baseline= may be one of "
              + ', '.join(names))
    lens = [int(k.split('_')[1]) / L for k in keys]
    head = ['encoding', 'params', 'n', *(f'{n:g}L' for n in lens), f'{lens[-1]:g}L - {baseline}', 'p', 'verdict', 'kernel', 'min']
    lines, summary = [], {}
    for (encoding, run), rows in table.items():
        label, base = ' '.join((encoding, run)).strip(), everything.get((baseline, run))
        cells, some = [label, f"{next(iter(rows.values()))['params']:,}", str(len(rows))], next(iter(rows.values()))
        entry = summary[label] = dict(n=len(rows), seeds=sorted(rows))
        for k in keys:
            x = np.array([r['metrics'][k] for r in rows.values()])
            half = interval(x)
            entry[k], entry[k + '_half'] = round(float(x.mean()), 4), None if math.isnan(half) else round(float(half), 4)
            cells.append(f'{x.mean():.3f} ' + (f"({some['metrics'][k + '_lo']:.3f}-{some['metrics'][k + '_hi']:.3f})" if math.isnan(half) else f'±{half:.3f}'))
        if base is not None and rows is not base:
            for k in keys:
                d, half, p, verdict = compare(rows, base, k, sign)
                if not verdict: # no seed of both, or not on the same rows
                    continue
                entry[k + '_vs_base'] = dict(difference=round(float(d), 4), half=None if math.isnan(half) else round(float(half), 4), p=float(f'{p:.2g}'), verdict=verdict)
            cells += [f'{d:+.3f}' + ('' if math.isnan(half) else f' ±{half:.3f}'), '<.001' if p < .001 else f'{p:.3f}', verdict] if verdict else ['n/a', 'n/a', 'n/a']
        else:
            cells += ['', '', 'baseline' if rows is base else '']
        ref = some['metrics'].get('ref_' + far.split('_')[1])
        cells += ['n/a' if ref is None else f'{ref:.3f}', f"{np.mean([r['wall_seconds'] for r in rows.values()]) / 60:.1f}"]
        lines.append(cells)
    print_table([head, *lines])
    rates = {label: sorted({r.get('learning_rate') or 'n/a' for r in rows.values()}) for label, rows in zip(summary, table.values()) if 'learning_rate=' not in label}
    if len({tuple(x) for x in rates.values()}) > 1:
        print('\nlearning rates: ' + ', '.join(f"{label} {'/'.join(x)}" for label, x in rates.items()))
    counts = sorted({len(r['scores'][far]) for rows in table.values() for r in rows.values()})
    what = 'accuracy' if sign > 0 else 'bits per byte'
    print(f"\n{what}: mean over n seeds ± 95% t interval, {' or '.join(f'{n:,}' for n in counts)} {'rows' if sign > 0 else 'windows'} each; L = {L}. In brackets (one seed): 95% interval over these. "
          f"p: {'McNemar' if sign > 0 else 'bootstrap'}, paired by {'row' if sign > 0 else 'window'}, pooled over seeds.\n"
          f"A verdict other than noise needs both: the t interval of the paired difference without 0, and p < .05. "
          f"kernel: the single-kernel reference at {lens[-1]:g}L. min: minutes per run.")
    places = [k for k in first['metrics'] if k.startswith('bpb_pos_')]
    if places: # the targets differ from column to column, so only a column's numbers compare
        print(f"\nbits per byte by position in windows of {lens[-1]:g}L, mean over the seeds:")
        print_table([['encoding', *(k[8:].replace('_', '-') for k in places)], *([' '.join(name).strip(), *(f'{mean(rows, k):.2f}' for k in places)] for name, rows in table.items())])
    figure = draw(table, keys, lens, what, path.removesuffix('.csv') + '.png') if plot else None
    print(json.dumps(dict(report=os.path.basename(path), baseline=baseline, figure=figure and os.path.basename(figure), encodings=summary)))

def draw(table, keys, lens, what, path):
    """The metric against T/L, a line and a band (95% t interval over seeds; for one seed that over rows) per encoding."""
    try:
        import matplotlib
    except ImportError:
        print('note: no figure, matplotlib is not installed')
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    runs = sorted({run for _, run in table})
    fig, axes = plt.subplots(1, len(runs), figsize=(4.2 * len(runs) + 4.3, 4.4), layout='constrained', sharey=True, squeeze=False)
    names = sorted({encoding for encoding, _ in table})
    lines, seen = {}, []
    for (encoding, run), rows in table.items():
        ax, name = axes[0, runs.index(run)], encoding.split()[0]
        style = [n for n in names if n.split()[0] == name].index(encoding) # 0 for its first variant
        x = np.array([[r['metrics'][k] for k in keys] for r in rows.values()])
        half = np.array([interval(c) for c in x.T])
        r = next(iter(rows.values()))['metrics']
        lo, hi = (x.mean(0) - half, x.mean(0) + half) if len(x) > 1 else ([r[k + '_lo'] for k in keys], [r[k + '_hi'] for k in keys])
        color = COLORS.get(name, COLORS.get(name.removesuffix('+alibi')))
        marker = dict(zip(COLORS, 'dphosP*DX^vd<>')).get(name, '>')             # the same in every figure; hollow for a variant
        ls = '--' if name not in COLORS else ('-', (0, (5, 1)), ':', '-.')[style % 4]
        line, = ax.plot(lens, x.mean(0), marker=marker, color=color, ls=ls, ms=5, fillstyle='none' if style else 'full')
        lines.setdefault(encoding, line)
        ax.fill_between(lens, lo, hi, color=color, alpha=.08, lw=0)
        ax.plot(lens, x.T, color=color, lw=.6, alpha=.5)                   # each seed
        seen += [x.min(), x.max()]
    for ax, run in zip(axes[0], runs):
        ax.set_title(run.replace('$', r'\$'), fontsize=9) # a $ starts a formula
        ax.set_xscale('log', base=2)
        ax.set_xticks(lens, [f'{n:g}' for n in lens])
        ax.set_xlabel('context length T / training length L')
        ax.grid(alpha=.3)
    margin = .05 * (max(seen) - min(seen)) + .01
    axes[0, 0].set_ylim(min(seen) - margin, max(seen) + margin)            # of the seeds: bands may leave it
    axes[0, 0].set_ylabel(f'{what} (thin: seeds; band: 95%)')
    fig.legend(lines.values(), lines, fontsize=8, loc='outside right center', frameon=False)
    save_figure(fig, path)
    print(f'figure: {path}')
    return path

specs = [s.strip() for s in pos.split(',') if s.strip()]
if report:
    report = os.path.join(report, 'results.csv') if os.path.isdir(report) else report
    if files or theirs:
        usage(f"{(files or theirs)[0]}: --report takes none of train.py's settings and no config file; it reads {report}")
    report_on(report, specs)
else:
    if not files or not specs:
        usage("expected a config file and --pos=a,b,c (or --report=results.csv); --help shows examples")
    results = results or os.path.join(out_dir, 'results.csv')
    if any(f.startswith('--seed=') for f in theirs):
        usage("--seed: a grid has --seeds=0,1,2")
    if len(learning_rate) > 1:
        if own_rate := [s for s in specs if ':learning_rate=' in s]:
            usage(f"--pos={own_rate[0]}: has a learning rate of its own, and --learning_rate= would tune it; take one of them out")
        if both := sorted({*seeds} & {*tune_seeds}):
            usage(f"--tune_seeds={','.join(map(str, tune_seeds))}: {both[0]} is among --seeds, but a rate chosen on a seed flatters it; give others")
    try:
        for s in specs: # a wrong name is said before anything runs
            make_pos(GPTConfig(n_embd=48, n_head=1, pos=s.split(':')[0]))
        os.makedirs(out_dir, exist_ok=True)
    except ValueError as e:
        usage(e)
    except OSError as e:
        fail(f"out_dir={out_dir!r} cannot be written ({e.strerror}): give another --out_dir")
    try:
        best = tuned(specs, results) if len(learning_rate) > 1 else {s: [f'--learning_rate={lr}' for lr in learning_rate] for s in specs}
        run_grid([(s, seed, *best[s]) for seed in seeds for s in specs], results) # seed by seed: a table early on
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on where it was (finished rows are in {os.path.dirname(results) or '.'})", file=sys.stderr)
        sys.exit(130)
    report_on(results)
