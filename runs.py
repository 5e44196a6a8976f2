"""
What a run leaves behind, and how it is taken up again.

    out_dir/ckpt.pt     everything that the rest of the run depends on
    out_dir/best.pt     the same, at the best validation loss
    out_dir/log.jsonl   a line for every evaluation and every log_interval; losses in nats per token
    results.csv         a row for every finished run, with the columns below

A run is known by its seed, by a hash of all settings that can change a number, and by the checksum of all
its data. Files of another FORMAT are refused: their shapes would fit, and the numbers would be wrong.
"""

import os
import re
import csv
import sys
import json
import time
import errno
import signal
import hashlib
import datetime
import subprocess
from dataclasses import fields
from importlib.util import find_spec
from types import SimpleNamespace

import torch

from common import fail, replace_file
from configurator import ROOT, usage
from model import GPT, GPTConfig, make_pos

FORMAT = 2 # of checkpoints and of results.csv

COLUMNS = '''
    time commit format config_hash run_hash data_checksum seed label dataset note metric
    pos pos_theta pos_grid pos_order pos_gamma0 pos_c pos_eta0 pos_eta_max pos_lr_mult
    n_layer n_head n_embd attn_temperature block_size batch_size max_iters learning_rate weight_decay
    params pos_params iters tokens_per_s device dtype torch train_seconds wall_seconds val_loss metrics
'''.split()

# settings that change no number
NOT_HASHED = '''
    out_dir results seed init_from eval_only skip_done dry_run json label log_interval eval_interval
    always_save_checkpoint save_best wandb_log wandb_project wandb_run_name device compile backend
'''.split()

# settings that a resumed run may have anew, beside those
FREE_ON_RESUME = 'eval_rows eval_targets eval_lens'.split()

# and what extend=True may change
EXTENDED = 'max_iters lr_decay_iters warmup_iters min_lr extend'.split()

# settings that belong to some tasks only
TASK_SETTINGS = 'kernel omega kernel_seed lengths eval_targets'.split()

# -----------------------------------------------------------------------------
# identity

def settings_that_count(config):
    """
    The settings that can change a number, as they work: micro-batches are slices of one batch, so their
    product counts.
    """
    config = dict(config, batch_size=config['batch_size'] * config['gradient_accumulation_steps'])
    return {k: v for k, v in config.items() if k not in (*NOT_HASHED, 'gradient_accumulation_steps')}

def digest(settings):
    return hashlib.sha256(json.dumps(sorted(settings.items())).encode()).hexdigest()[:12]

def identity(config, task, extended=()):
    """What a run is found again by. `extended` has an entry for each time it was given more iterations."""
    settings = settings_that_count(config)
    unseen = {k: v for k, v in settings.items() if k not in COLUMNS}
    extra = {'extended': extended} if extended else {}
    return dict(config_hash=digest(settings | extra), run_hash=digest(unseen | extra),
                data_checksum=task.checksum, seed=config['seed'])

def check_settings(config):
    """What settings alone can be refused for; returns those of the model."""
    c = SimpleNamespace(**config)
    end = min(c.max_iters, c.lr_decay_iters) if c.decay_lr else c.max_iters
    if c.max_iters > 0 and c.warmup_iters > end:
        usage(f"warmup_iters={c.warmup_iters}: the warm-up would end after the run or its decay "
              f"(max_iters={c.max_iters}, lr_decay_iters={c.lr_decay_iters})")
    if c.decay_lr and c.min_lr > c.learning_rate:
        usage(f"min_lr={c.min_lr:g}: expected min_lr <= learning_rate={c.learning_rate:g}")
    if c.extend and c.init_from != 'resume':
        usage("extend=True gives more iterations to a run that is taken up again: add --init_from=resume")
    if c.wandb_log and not find_spec('wandb'):
        usage("wandb_log=True needs wandb: pip install wandb, or leave it out")
    model_args = {f.name: config[f.name] for f in fields(GPTConfig) if f.name != 'vocab_size'}
    try:
        GPTConfig(**model_args)
    except ValueError as e:
        usage(e)
    return model_args

def lengths_to_measure(config, task, say):
    """Those of eval_lens that task and model have, and the longest for which targets are chosen."""
    asked, L = config['eval_lens'], config['block_size']
    measured, why = task.available(asked)
    longest = max(measured, default=0) # of the task: the same targets are scored for every encoding
    reasons = [why] if len(measured) < len(asked) else []
    if config['pos'] == 'learned' and longest > L:
        measured = tuple(T for T in measured if T <= L)
        reasons.append(f'pos=learned has no positions beyond block_size={L}')
    if not measured:
        fail(f"nothing can be measured at {', '.join(map(str, asked))}: {'; '.join(reasons)}")
    if reasons:
        missing = ', '.join(str(T) for T in asked if T not in measured)
        say(f"note: not measured at {missing}: {'; '.join(reasons)}")
    return measured, longest

# -----------------------------------------------------------------------------
# out_dir: one run at a time, its log

def hold(f, wait=True):
    """Lock an open file until it is closed. False: another process has it. Where there are no locks, True."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError): # Windows; a network drive without locks
        pass
    return True

def open_out_dir(out_dir, resumed, say):
    """Make out_dir, see that no other run is in it, clear what a killed one was writing. Returns its lock."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        lock = open(os.path.join(out_dir, '.lock'), 'w')
        if not hold(lock, wait=False):
            fail(f"out_dir={out_dir!r}: another run is writing there; wait for it, or give another --out_dir")
        for file in os.listdir(out_dir):
            if re.fullmatch(r'(ckpt\.pt|best\.pt|log\.jsonl)\.\d+\.tmp', file):
                os.remove(os.path.join(out_dir, file))
        if not resumed and os.path.exists(os.path.join(out_dir, 'ckpt.pt')):
            say(f"note: the checkpoints of an earlier run in {out_dir} are written over")
    except OSError as e:
        fail(f"out_dir={out_dir!r} cannot be written ({e.strerror}): give another --out_dir")
    return lock

class Log:
    """log.jsonl, and wandb's copy. A resumed run drops what the file holds beyond its checkpoint."""

    def __init__(self, out_dir, iter_num, config, silent):
        self.path, self.wandb, self.silent = os.path.join(out_dir, 'log.jsonl'), None, silent
        if silent:
            return
        if config['wandb_log']:
            import wandb
            wandb.init(project=config['wandb_project'], name=config['wandb_run_name'] or None, config=config)
            self.wandb = wandb
        kept = ''
        try:
            if iter_num and os.path.exists(self.path):
                with open(self.path, encoding='utf-8', errors='replace') as f:
                    lines = re.findall(r'^(\{"iter": (\d+), .*\}\n)', f.read(), flags=re.M)
                kept = ''.join(line for line, it in lines if int(it) < iter_num)
            replace_file(self.path, lambda f: f.write(kept.encode()))
        except OSError as e:
            fail(f"{self.path}: cannot be written ({e.strerror}); what was there before is intact")

    def __call__(self, **values):
        if self.silent:
            return
        try:
            with open(self.path, 'a', encoding='utf-8') as f:
                f.write(json.dumps(values) + '\n')
        except OSError as e:
            fail(f"{self.path}: cannot be written ({e.strerror}); the last checkpoint is intact")
        if self.wandb:
            self.wandb.log(values, step=values['iter'])

# -----------------------------------------------------------------------------
# signals

class Signals:
    """
    SIGINT, SIGTERM and SIGHUP ask a run to stop: it finishes its iteration, saves, and ends with the
    usual status. A second one ends it at once, and so does the first one while there is a message: what
    to say then. A reader that has gone away asks, too.
    """
    def __init__(self):
        self.caught, self.message = None, 'stopped before the first iteration'
        for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
            number = getattr(signal, name, None) # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN: # nohup's wish
                signal.signal(number, self.on_signal)

    def on_signal(self, number, frame=None):
        if self.caught or self.message:
            print(self.message or 'stopped at once', file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.caught = number

    def after_iteration(self):
        """From now on a signal is only noted in `caught`; the loop looks there after each iteration."""
        self.at_once('')

    def at_once(self, message):
        """From now on a signal says this and ends the run at once; '': after its iteration."""
        self.message = message
        if self.caught and message:
            self.on_signal(self.caught)

    def say(self, *args):
        """print, unless nobody reads any more (train.py | head) or no room is left: a wish to stop."""
        try:
            print(*args, flush=True)
        except OSError as e:
            sys.stdout = open(os.devnull, 'w')
            self.caught = self.caught or 13 # SIGPIPE
            if not isinstance(e, BrokenPipeError):
                print(f"stdout cannot be written ({e.strerror}): the run saves and ends", file=sys.stderr)

# -----------------------------------------------------------------------------
# checkpoints: tensors and plain Python types only, so that torch.load(weights_only=True) reads them

def save(path, checkpoint):
    try:
        replace_file(path, lambda f: torch.save(checkpoint | {'format': FORMAT}, f))
    except OSError as e:
        fail(f"{path}: cannot be written ({e.strerror}); what was there before is intact")
    except RuntimeError: # how torch reports a write that failed
        fail(f"{path}: cannot be written (is the disk full?); what was there before is intact")

def load(path):
    """The dict that train.py saved, on the CPU; one line if it is missing, unreadable or damaged."""
    if not os.path.exists(path):
        fail(f"{path}: no checkpoint there; train.py writes one to its out_dir at every evaluation")
    if os.path.isdir(path):
        fail(f"{path}: is a folder; expected a checkpoint, such as {os.path.join(path, 'ckpt.pt')}")
    try:
        with open(path, 'rb') as f:
            checkpoint = torch.load(f, map_location='cpu', weights_only=True)
    except Exception as e: # zip, pickle and key errors of many kinds
        if isinstance(e, OSError) and e.errno != errno.EINVAL: # that is a seek in a file that was cut
            fail(f"{path}: cannot be read ({e.strerror}); the file may be sound")
        if isinstance(e, MemoryError) or 'alloc' in str(e) or 'memory' in str(e):
            fail(f"{path}: not enough memory to read it; the file may be sound")
        fail(f"{path}: damaged or no checkpoint ({type(e).__name__}); delete it, or use another one")
    parts = dict(model=dict, model_args=dict, config=dict, data=str)
    sound = isinstance(checkpoint, dict)
    if not sound or not all(isinstance(checkpoint.get(name), kind) for name, kind in parts.items()):
        fail(f"{path}: not a checkpoint of this project's train.py")
    if checkpoint.get('format') != FORMAT:
        fail(f"{path}: has format {checkpoint.get('format')}, this version writes and reads {FORMAT}; "
             "train anew, or use the version that wrote it")
    return checkpoint

def model_of(checkpoint, path):
    """The model of a loaded checkpoint."""
    if not all(value.isfinite().all() for value in checkpoint['model'].values()):
        fail(f"{path}: its weights are not finite; use another checkpoint")
    try:
        model = GPT(GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
    except (RuntimeError, ValueError, TypeError) as e:
        fail(f"{path}: its settings or weights do not fit this model.py ({' '.join(str(e).split())[:200]})")
    return model

def resume(path, config, task, extend):
    """
    The checkpoint of a run that is taken up again. What decides the rest of the run must be what it was:
    it is compared setting by setting, in their order. Only extend=True may give it more iterations, and
    is remembered in its hash.
    """
    checkpoint = load(path)
    lacking = {'optimizer', 'scaler', 'iter_num', 'best_val_loss', 'seconds', 'extended'} - checkpoint.keys()
    if lacking:
        fail(f"{path}: holds no {', '.join(sorted(lacking))}, so it cannot be resumed; sample.py can use it")
    saved, now = (settings_that_count(c) | {'seed': c['seed']} for c in (checkpoint['config'], config))
    saved['data'], now['data'] = checkpoint['data'], task.checksum or task.note
    changed = {k: saved.get(k) for k in now if saved.get(k) != now[k] and k not in FREE_ON_RESUME}
    hints = dict(max_iters="; --extend=True gives a run more iterations", extend=": it is an extended run")
    for key in sorted(changed, key=lambda key: key == 'extend'): # what differs besides tells more
        if not (extend and key in EXTENDED):
            hint = hints.get(key, '')
            usage(f"--init_from=resume: {key} is {saved.get(key)!r} in {path}, but {now[key]!r} now; "
                  f"resume with the same settings and data, or start anew in another --out_dir{hint}")
    if config['max_iters'] < checkpoint['iter_num']:
        usage(f"--init_from=resume: {path} has {checkpoint['iter_num']} iterations already, more than "
              f"max_iters={config['max_iters']}")
    if set(changed) == {'extend'}:
        usage(f"extend=True: max_iters={config['max_iters']} is what {path} was started with; give more")
    if changed:
        checkpoint['extended'] = [*checkpoint['extended'], [checkpoint['iter_num'], changed]]
    return checkpoint

def restore(checkpoint, path, optimizer, scaler):
    """The state of the optimizer and of the gradient scaler."""
    try:
        optimizer.load_state_dict(checkpoint['optimizer'])
        scaler.load_state_dict(checkpoint['scaler'])
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        reason = ' '.join(str(e).split())[:200]
        fail(f"{path}: its optimizer state does not fit ({reason}); start from scratch")

def describe_groups(optimizer):
    """A line for each group of parameters."""
    lines = []
    for group in optimizer.param_groups:
        count = sum(p.numel() for p in group['params'])
        lines.append(f"{count:10,} parameters {group['name']}: weight decay {group['weight_decay']:g}, "
                     f"learning rate x{group['lr_mult']:g}")
    return '\n'.join(lines)

def compile_blocks(model, x, y, context, say):
    """
    torch.compile, block by block: as fast as the whole model, compiled in a fraction of the time. Tried
    out on one batch, since a missing compiler shows at the first step only; False if it failed, and the
    run goes on without.
    """
    start = time.perf_counter()
    try:
        for block in model.transformer.h:
            block.compile()
        with context:
            model(x, y)[1].backward()
        say(f"compiled in {time.perf_counter() - start:.0f} s")
        return True
    except Exception as e: # of the compiler, of any kind
        reason = (str(e).strip().splitlines() or [''])[0][:150]
        say(f"torch.compile failed ({type(e).__name__}: {reason}); going on in eager mode")
        torch.compiler.set_stance('force_eager')
        return False
    finally:
        model.zero_grad(set_to_none=True)

# -----------------------------------------------------------------------------
# results: one row per run

def git_commit():
    """Short hash of the commit that ran, with + where the tree was changed; '' outside git."""
    command = 'git describe --always --dirty=+ --exclude=*'
    try:
        return subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError: # no git
        return ''

def describe_run(config, run_id, task, model, iters, seconds, device_name, val_loss, metrics):
    """The row of a finished run. What the model is comes from the model, not from the settings."""
    c = model.config
    row = dict(time=datetime.datetime.now().isoformat(timespec='seconds'), commit=git_commit(), format=FORMAT)
    row |= run_id | dict(dataset=config['dataset'], note=task.note, metric=task.metric)
    row |= {f.name: getattr(c, f.name) for f in fields(c) if f.name in COLUMNS}
    row |= {k: config[k] for k in ('pos_lr_mult', 'max_iters', 'learning_rate', 'weight_decay', 'dtype')}
    rows_per_iter = config['batch_size'] * config['gradient_accumulation_steps']
    trained, whole = seconds
    tokens = iters * rows_per_iter * sum(task.lengths) / len(task.lengths)
    row |= dict(
        batch_size=rows_per_iter,
        params=sum(p.numel() for p in model.parameters()),
        pos_params=model.positional_parameters(),
        iters=iters,
        tokens_per_s=round(tokens / trained) if trained > 0 else 0,
        device=device_name,
        torch=torch.__version__,
        train_seconds=round(trained, 1),
        wall_seconds=round(whole, 1),
        val_loss=round(val_loss, 6),
        metrics=metrics)
    return {name: row[name] for name in COLUMNS}

def check_results(path):
    """Before anything is trained: the csv can be appended to, and its columns are ours."""
    if path.endswith(('/', os.sep)) or os.path.exists(path) and not os.path.isfile(path):
        usage(f"results={path!r} is no file: name a csv file")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass # it will be made, or said below
    except OSError as e: # a name that is too long
        usage(f"results={path[:60]!r}: {e.strerror}; give another --results")
    read_rows(path)
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.access(there, os.W_OK) or os.path.isfile(there) != os.path.isfile(path):
        usage(f"results={path!r} cannot be written there: give another --results or --out_dir")

def exit_if_done(path, run_id, as_line, say):
    """End here if the csv has this run's row."""
    done = find(path, **run_id)
    if done:
        say('this run is in the results already')
        if as_line:
            say(as_json(done))
        sys.exit()

def as_json(row):
    """A row, new or from the csv, as one JSON object."""
    metrics = row['metrics'] if isinstance(row['metrics'], dict) else json.loads(row['metrics'])
    return json.dumps(row | dict(metrics=metrics, val_loss=float(row['val_loss'])))

def label_of(config, flags):
    """What the row of a run is called: its encoding, and those of its settings that were given as flags."""
    own = [k for k in config if k.startswith('pos_') and k in flags and config[k] is not None]
    values = [f'{config[k]:g}' if isinstance(config[k], float) else str(config[k]) for k in own]
    return ' '.join([config['pos'], *(f"{k.removeprefix('pos_')}={v}" for k, v in zip(own, values))])

def without_effect(config, task, flags):
    """A line for every flag that changes nothing in this run."""
    one_process = 'RANK' not in os.environ
    where = [
        (f"on dataset={config['dataset']}", [k for k in TASK_SETTINGS if k not in task.settings]),
        ("with decay_lr=False", [] if config['decay_lr'] else ['min_lr', 'lr_decay_iters']),
        ("without wandb_log=True", [] if config['wandb_log'] else ['wandb_project', 'wandb_run_name']),
        ("on a single process", ['backend'] if one_process else []),
        (f"on pos={config['pos']}", [k for k in flags if k.startswith('pos_') and not has_effect(config, k)]),
    ]
    flags = list(dict.fromkeys(flags))
    return [f"{key} has no effect {words}" for words, keys in where for key in flags if key in keys]

@torch.no_grad()
def has_effect(config, key):
    """Would the encoding score otherwise without this setting? Asked with its parameters moved a little."""
    given = {f.name: config[f.name] for f in fields(GPTConfig) if f.name in config}
    if key == 'pos_lr_mult':
        return any(True for _ in make_pos(GPTConfig(**given)).parameters())
    default, scores = getattr(GPTConfig, key), []
    x = torch.linspace(-1, 1, 8 * config['n_embd']).view(1, 8, config['n_head'], -1).transpose(1, 2).double()
    for args in (given, given | {key: default}):
        try:
            pos = make_pos(GPTConfig(**args)).double()
        except ValueError: # what is given would not be possible without it
            return True
        for p in pos.parameters():
            p += .1
        scores.append(pos.logits(x, x, torch.arange(8), torch.arange(8)))
    return given[key] == default or not torch.equal(*scores)

def read_rows(path):
    """The rows of a results csv as dicts, [] if there is none. A row that a crash cut is left out."""
    if not os.path.exists(path):
        return []
    csv.field_size_limit(2**24)
    try:
        with open(path, newline='', encoding='utf-8') as f:
            same = {} # most cells are those of many rows
            rows = [[same.setdefault(cell, cell) for cell in row] for row in csv.reader(f)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        fail(f"{path}: cannot be read as a csv of results ({type(e).__name__}: {e}); "
             "move it away, or name another with --results")
    if not rows:
        return []
    if rows[0] != COLUMNS:
        marked = rows[0] and rows[0][0].startswith('\ufeff')
        what = 'a byte order mark (of a spreadsheet)' if marked else "other columns than this version's"
        fail(f"{path}: has {what}; move it away, or name another with --results")
    whole = [dict(zip(COLUMNS, row)) for row in rows[1:] if is_whole(row)]
    if len(whole) < len(rows) - 1:
        print(f"note: {path}: {len(rows) - 1 - len(whole)} rows are damaged and left out", file=sys.stderr)
    others = {row['format'] for row in whole} - {str(FORMAT)}
    if others:
        fail(f"{path}: has rows of format {', '.join(sorted(others))}, this version has {FORMAT}; "
             "move it away, or name another with --results")
    return whole

def is_whole(row):
    """Are all cells there, the validation loss a number and the metrics an object?"""
    try:
        return len(row) == len(COLUMNS) and isinstance(json.loads(row[-1]), dict) and bool(float(row[-2]) + 1)
    except ValueError:
        return False

def find(path, **cells):
    """The last row of the csv with these values, or None."""
    found = [row for row in read_rows(path) if all(row[k] == str(v) for k, v in cells.items())]
    return found[-1] if found else None

def append(path, row):
    """Append a row to a csv file, with the header if it is new. Safe for runs that end at the same time."""
    row = row | {'metrics': json.dumps(row['metrics'])}
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        with open(path, 'a+', newline='', encoding='utf-8', errors='backslashreplace') as f:
            hold(f)
            f.seek(0)
            text = f.read()
            if text and not text.endswith('\n'): # a crash cut the last row short; inside a quoted cell or not
                f.write('"\r\n' if text.count('"') % 2 else '\r\n')
            writer = csv.DictWriter(f, fieldnames=COLUMNS)
            if not text:
                writer.writeheader()
            writer.writerow(row)
    except OSError as e:
        print(json.dumps(row), flush=True) # whatever becomes of the csv
        fail(f"{path}: cannot be written ({e}); the row stands above, on stdout; give another --results")
