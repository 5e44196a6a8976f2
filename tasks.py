"""
What a model is trained on, and how it is scored: one small class per kind of data.
Every script asks its task, and none asks what kind it is.

    KernelTask, RecallTask   rows made in memory (dataset=synth, dataset=recall)
    TextTask, MusicTask      a folder of data/ with a stream of tokens: one text, or pieces of music
    RowsTask                 a folder of data/ with rows that somebody made

x (n, T) holds the tokens of n rows, y (n, k) what is asked at the last k of their positions: in a stream the
next token, in rows whatever the answer is. Both are whole numbers of any type. -1 in y: nothing is asked
there, neither trained nor scored. The tasks below ask at all k; yours may leave some out.
To add a task, write a subclass of Task with what its docstring asks for, and give it a line in TASKS.
"""

import os
import math
import hashlib
from zipfile import BadZipFile

import numpy as np
import torch
from torch.nn import functional as F

from common import fail
from configurator import ROOT, usage
from data.folder import read_folder
from data.text.codec import codec, read_file, readable

# name in the csv: (what it is called, +1 if more is better or -1, differences within this margin are `level`)
METRICS = {
    'acc': ('accuracy', +1, .02),
    'bpb': ('bits per byte', -1, .01),
    'bpt': ('bits per token', -1, .01),
}

# rows are drawn from default_rng([seed, stream, number]) and from nothing else: the same ones for every
# encoding, whatever ran before. The number is the iteration in training. In an evaluation it is the length T,
# but 0 for windows, which end at the same places at every T
STREAMS = {'train': 1, 'val': 2, 'test': 3}

def generator(seed, split, number):
    return np.random.default_rng([seed, STREAMS[split], number])

def commas(numbers):
    return ','.join(map(str, numbers))

# -----------------------------------------------------------------------------
# scoring, the same for every task

TOKENS_PER_FORWARD = 8192 # bounds the memory of an evaluation; twice as many are slower on a CPU
LOGITS_PER_FORWARD = 2**26 # 256 MiB in float32

@torch.no_grad()
def score(model, x, y, answers, device, context):
    """
    x (N, T), y (N, k) -> nats (N, k): the loss of each target, and hits (N, k): was it the likeliest of the
    first `answers` tokens? Where y is -1 both are 0.
    """
    nats, hits = [], []
    logits_per_row = y.size(1) * model.config.vocab_size
    # n rows a forward
    n = max(1, min(TOKENS_PER_FORWARD // x.size(1), LOGITS_PER_FORWARD // logits_per_row))
    for a in range(0, len(x), n):
        xs = x[a:a + n].to(device).long()
        ys = y[a:a + n].to(device).long()
        with context:
            logits, _ = model(xs, ys) # with targets, so that it returns their k positions, not the last alone
        logits = logits.float()                                                     # (n, k, vocab_size)
        loss = F.cross_entropy(logits.transpose(1, 2), ys, ignore_index=-1, reduction='none')
        nats.append(loss.cpu())
        hits.append((logits[..., :answers].argmax(dim=-1) == ys).cpu())
    return torch.cat(nats).double().numpy(), torch.cat(hits).numpy()

def ratio(a, b):
    """
    A value for each row, whose mean is sum(a) / sum(b): the bits of all rows over the bytes of all rows, say.
    The mean of a / b would be another number: a row of few bytes would count as much as one of many.
    """
    if (b == b[0]).all():
        return a / b[0]
    # to first order, a row moves the ratio of all rows by what its a is above ratio * b. `interval` can
    # then resample this one list instead of pairs of a and b
    of_all = a.sum() / b.sum()
    return of_all + (a - of_all * b) / b.mean()

def interval(values, resamples=2000):
    """The 95% interval of the mean over the rows of one run: two floats."""
    n, mean = len(values), float(values.mean())
    if np.isin(values, (0, 1)).all(): # each right or wrong: Wilson's, which at 0 and at 1 still has a width
        z = 1.959964 # a normal is within +-z with 95%
        scale = 1 + z * z / n
        centre = mean + z * z / (2 * n)
        half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return (centre - half) / scale, (centre + half) / scale
    if n < 2: # one window tells nothing of the spread
        return math.nan, math.nan
    # bootstrap: the mean of n rows drawn again from these
    rng = np.random.default_rng(0)
    means = []
    for _ in range(resamples): # one at a time: memory stays that of the values
        means.append(values[rng.integers(0, n, n)].mean())
    return tuple(np.quantile(means, [.025, .975]).tolist())

# -----------------------------------------------------------------------------
# what tasks have in common

class Task:
    """
    Each task adds vocab_size, answers (the first `answers` tokens can be an answer), note (what the csv says
    of it; before Task.__init__) and rows(rng, T, n) -> x (n, T), y (n, k), or a `batch` and `examples` of its
    own. If it has `chance`, the metric of guessing, figures draw a line there. A setting of its own goes into
    train.py, into TASK_SETTINGS of runs.py and into `settings` here.
    """
    metric = 'acc'
    unit, per_nat = 'nats per token', 1.0 # how a loss is printed: in this unit, so many of it per nat
    checksum = '' # of the files, where there are any
    uses = ('num_samples', 'seed') # settings of sample.py that have an effect in `show`
    settings = ('lengths',) # of train.py's settings for some tasks only, those that this one has
    shortest = 2 # the smallest T of a row

    def __init__(self, config):
        self.L = config['block_size']
        self.lengths = config['lengths'] or (self.L,)
        if self.L < self.shortest:
            usage(f"block_size={self.L}: a row of {config['dataset']} has at least {self.shortest} tokens")
        if min(self.lengths) < self.shortest or max(self.lengths) > self.L:
            usage(f"lengths={commas(self.lengths)}: expected {self.shortest} <= T <= block_size={self.L}")
        if config['lengths']:
            self.note += f" lengths={commas(self.lengths)}"

    def batch(self, seed, it, n):
        """The n rows of iteration `it`, drawn anew for each: x (n, T), y (n, k)."""
        rng = generator(seed, 'train', it)
        T = int(rng.choice(self.lengths))
        return self.rows(rng, T, n)

    def examples(self, split, T, n, seed, longest, k):
        """
        n rows of length T of 'val' or 'test'. A made row has its own targets at every T: k and `longest` do
        not matter. A text is scored on the same last k tokens at every T: each window ends where one of
        `longest`, the largest T, fits too.
        """
        return self.rows(generator(seed, split, T), T, n)

    def available(self, lengths):
        """Those of the lengths that can be scored, and why the others cannot."""
        return tuple(T for T in lengths if T >= self.shortest), f"a row has at least {self.shortest} tokens"

    def values(self, nats, hits, y):
        """(N, k) each -> (N,), whose mean is the metric: the share of the asked targets that are right."""
        return ratio(hits.sum(axis=1), (y >= 0).sum(axis=1))

    def spell(self, tokens):
        return ' '.join(map(str, tokens))

    def show(self, model, how):
        """What sample.py prints: some rows of each length, and how likely the model found the last answer."""
        lengths = [n * self.L for n in (1, 2, 4, 8) if n * self.L <= model.longest]
        lengths, why = self.available(lengths)
        if not lengths:
            print(f"no rows to show: {why}")
        for T in lengths:
            x, y = self.examples('test', T, how.num_samples, how.seed, T, T)
            nats, hits = score(model, x, y, self.answers, how.device, how.context)
            value = self.values(nats, hits, y.numpy()).mean()
            print(f"\nT = {T} ({T / self.L:g} L), {len(x)} rows: {METRICS[self.metric][0]} {value:.3f}")
            print(f"{'the last tokens':>48} {'answer':>6} {'P(answer)':>9}")
            for row in range(len(x)):
                tokens = self.spell(x[row, -40:].tolist())
                wrong = '' if hits[row, -1] else '   wrong'
                print(f"{tokens[-48:]:>48} {y[row, -1]:6} {math.exp(-nats[row, -1]):9.3f}{wrong}")

# -----------------------------------------------------------------------------
# rows made in memory. They take less time than reading them would

def w5(w):
    """From index 3 of the grid of a head to index 5: 10000^(-2*3/32) becomes 10000^(-2*5/32)."""
    return w ** (5 / 3)

# the teachers of KernelTask at lag d; w = omega, by default 10000^(-2*3/32)
KERNELS = {
    'mixed':       lambda d, L, w: d / L * np.cos(w * d),
    'phase':       lambda d, L, w: np.cos(w * d),
    'linear':      lambda d, L, w: -d / L,
    'damped_wave': lambda d, L, w: np.exp(-1e-4 * d) * (np.cos(w * d) + .75 * d / L * np.sin(w * d)),
    'phase_drift': lambda d, L, w: np.cos(w * (1 + 5e-5) * d),
    'seasonal':    lambda d, L, w: (.35 + .9 * d / L) * np.cos(w * d) + .25 * np.sin(w * d),
    'rhythm':      lambda d, L, w: (.25 + .85 * d / L) * (.65 * np.cos(w * d) + .35 * np.sin(w5(w) * d)),
    'motif':       lambda d, L, w: d / (L + .25 * d) * (.7 * np.cos(w5(w) * d) - .3 * np.sin(w5(w) * d)),
    'decay':       lambda d, L, w: np.exp(-d / L) * np.cos(w * d),
    'jet_2':       lambda d, L, w: (d / L) ** 2 * np.cos(w * d),
    'jet_3':       lambda d, L, w: (d / L) ** 3 * np.cos(w * d),
    'high_jet_1':  lambda d, L, w: d / L * np.exp(-.1 * d / L) * np.cos(w * d),
    'high_jet_2':  lambda d, L, w: (d / L) ** 2 * np.exp(-.1 * d / L) * np.cos(w * d),
    'high_jet_3':  lambda d, L, w: (d / L) ** 3 * np.exp(-.1 * d / L) * np.cos(w * d),
}

def random_kernel(seed, L):
    """A sum of five damped waves: amplitude normal, damping 0 to 2 per L, period 8 to L, any phase."""
    rng = np.random.default_rng([seed, 9]) # 9: none of STREAMS
    a = rng.normal(size=5)
    g = rng.uniform(0, 2, 5) / L
    p = rng.uniform(0, 2 * math.pi, 5)
    w = 2 * math.pi / np.exp(rng.uniform(math.log(8), math.log(max(L, 8)), 5))
    return lambda d: sum(a[n] * np.exp(-g[n] * d) * np.cos(w[n] * d + p[n]) for n in range(5))

class KernelTask(Task):
    """
    The synthetic task of the paper (section 6): T - 1 random bits, then QUERY. The answer is 1 iff
        sum_{d = 1 .. T-1} K(d) (2 bit_d - 1) > 0,
    bit_d the bit d tokens before QUERY, K(d) = (d/L) cos(omega d) by default; L is the training length at
    any T.
    """
    QUERY = 2
    TIE = 1e-9 # a sum that is not above counts as zero: its rounding noise depends on the machine
    chance = 1 / 2
    settings = 'kernel', 'omega', 'lengths'
    omega = None # the teacher's frequency, where it has one: probe.py looks for it in what was learned
    vocab_size, answers = 3, 2 # 0, 1, QUERY; the first two of them are answers

    def __init__(self, config):
        name, L, omega = config['kernel'], config['block_size'], config['omega']
        if name in KERNELS:
            self.teacher = lambda d: KERNELS[name](d, L, omega)
            self.note = f"{name} omega={omega:.4g}"
            if name == 'linear': # the one that has no omega
                self.settings = 'kernel', 'lengths'
            else:
                self.omega = omega
        elif name == 'random':
            # another teacher for every seed, unless one is asked for
            given = config['kernel_seed']
            self.teacher = random_kernel(config['seed'] if given is None else given, L)
            self.note = 'random kernel' if given is None else f"random kernel {given}"
            self.settings = 'kernel', 'kernel_seed', 'lengths'
        else:
            usage(f"kernel={name!r}: expected one of {', '.join(KERNELS)}, random")
        super().__init__(config)

    def K(self, d):
        """The teacher at lags d >= 1; a subclass may have another."""
        return self.teacher(d)

    def rows(self, rng, T, n):
        bits = rng.integers(0, 2, (n, T - 1), dtype=np.uint8)
        K = self.K(np.arange(T - 1, 0, -1)) # by position: lag T - 1 comes first
        answer = np.zeros((n, 1), np.int64)
        for a in range(0, n, 512): # as float64 the bits take eight times their memory
            answer[a:a + 512, 0] = (2.0 * bits[a:a + 512] - 1) @ K > self.TIE
        x = np.concatenate((bits, np.full((n, 1), self.QUERY, np.uint8)), axis=1)
        return torch.from_numpy(x), torch.from_numpy(answer)

    def spell(self, tokens):
        return ''.join('01?'[t] for t in tokens)

class RecallTask(Task):
    """
    Associative recall at a distance: eight keys, each with its value in one token, lie anywhere in a row of
    blanks; the row ends with the keys alone, in another order, and the value of each is asked.
    Tokens: values 0-3, a key with its value 4-35, a key alone 36-43, blank 44.
    """
    KEYS, VALUES, BLANK = 8, 4, 44
    vocab_size, answers, shortest = 45, 4, 16
    chance = 1 / 4
    note = '8 keys, 4 values'

    def rows(self, rng, T, n):
        K, V = self.KEYS, self.VALUES
        # one draw for a whole row at a time: row 5 is the same row, whether 10 or 1000 are asked for
        for_value, for_order, for_place = np.split(rng.random((n, K + T)), [K, 2 * K], axis=1)
        value = (V * for_value).astype(np.int64)                    # (n, K), of each key
        order = for_order.argsort(axis=1)                           # (n, K), in which the keys are asked
        place = for_place.argsort(axis=1)[:, :K]                    # (n, K), among the first T - K tokens
        with_value = V + V * np.arange(K) + value                   # (n, K), tokens 4-35
        alone = V + V * K + order                                   # (n, K), tokens 36-43
        x = np.full((n, T), self.BLANK, np.uint8)
        np.put_along_axis(x, place, with_value, axis=1)
        x[:, -K:] = alone
        return torch.from_numpy(x), torch.from_numpy(np.take_along_axis(value, order, axis=1))

# -----------------------------------------------------------------------------
# a folder of data/ with files of tokens; data/folder.py reads and checks them

class FolderTask(Task):
    """What the tasks of a folder have in common. data is {split: (path, dtype, tokens per row)}."""

    def __init__(self, config, meta, data, checksum):
        self.meta, self.data, self.checksum = meta, data, checksum
        self.vocab_size, self.note = meta['vocab_size'], meta.get('note', '')
        super().__init__(config)

    def tokens(self, split):
        """(N,), or of rows (rows, T + 1). Opened anew: an open map keeps in memory what was read."""
        path, dtype, per_row = self.data[split]
        tokens = np.memmap(path, dtype, mode='r')
        return tokens if per_row == 1 else tokens.reshape(-1, per_row)

class TextTask(FolderTask):
    """A stream of tokens. The metric is bits per byte, of the same bytes at every length."""
    metric, unit = 'bpb', 'bits per byte'
    settings = 'lengths', 'eval_targets'
    uses = ('start', 'num_samples', 'max_new_tokens', 'temperature', 'top_k', 'seed', 'stop', 'score')

    def __init__(self, config, meta, data, checksum):
        super().__init__(config, meta, data, checksum)
        self.answers = self.vocab_size
        self.test = 'test' if 'test' in data else 'val'
        if self.test == 'val':
            self.note += ' test=val'
        self.bytes = self.bytes_of_tokens()
        # a printed loss takes every token for the mean one of train.bin, `values` has the bytes of each
        train = meta['splits']['train']
        self.per_nat = train['tokens'] / train['bytes'] / math.log(2)
        for split in ('train', 'val'):
            if len(self.tokens(split)) <= self.L:
                fail(f"data/{config['dataset']}/{split}.bin has {len(self.tokens(split)):,} tokens, too few "
                     f"for a window of block_size={self.L}: use a longer text, or a smaller block_size")

    def bytes_of_tokens(self):
        """(vocab_size,): how many bytes of text a token stands for. A file of them goes into the checksum."""
        if self.meta['encoding'] == 'bytes':
            return np.ones(self.vocab_size, np.uint8)
        path = os.path.join(os.path.dirname(self.data['train'][0]), 'token_bytes.npy')
        try:
            lengths = np.load(path)
        except (OSError, EOFError, ValueError, BadZipFile): # missing, empty, damaged
            lengths = np.zeros(0)
        if getattr(lengths, 'shape', None) != (self.vocab_size,):
            fail(f"{os.path.relpath(path, ROOT)}: missing, or not a number of bytes for each token; "
                 "run its prepare.py again")
        both = self.checksum + str(lengths.tolist())
        self.checksum = hashlib.sha256(both.encode()).hexdigest()[:16]
        return lengths

    def rows(self, rng, T, n):
        """Any windows of T + 1 tokens: all but the first are targets."""
        tokens = self.tokens('train')
        starts = rng.integers(0, len(tokens) - T, n)
        return self.windows(tokens, starts + T + 1, T, T)

    def windows(self, tokens, ends, T, k):
        """T + 1 tokens before each of these ends: x is all but the last one, y the last k."""
        rows = np.stack([tokens[end - T - 1:end] for end in ends])
        rows = torch.from_numpy(rows.astype(np.int64))
        return rows[:, :-1], rows[:, -k:]

    def examples(self, split, T, n, seed, longest, k):
        """Windows with the same last k tokens at every T: their ends are a grid, shifted by the seed."""
        tokens = self.tokens(self.test if split == 'test' else split)
        k = min(k, T)
        first = longest + 1                     # the first place where a window of any T can end
        room = len(tokens) - first              # and how many more there are
        n = min(n, room // k + 1)               # ends lie k or more apart: no target is scored twice
        stride = max(k, room // n)
        offset = generator(seed, split, 0).integers(0, room - stride * (n - 1) + 1)
        return self.windows(tokens, first + offset + stride * np.arange(n), T, k)

    def available(self, lengths):
        N = len(self.tokens(self.test))
        return tuple(T for T in lengths if T < N), f"{self.test}.bin has {N:,} tokens"

    def values(self, nats, hits, y):
        """(N, k) each -> (N,), whose mean is the bits of all targets over the bytes of all targets."""
        return ratio(nats.sum(axis=1) / math.log(2), self.bytes[y].sum(axis=1, dtype=np.int64))

    def show(self, model, how):
        """What sample.py prints: texts that go on from a prompt, or the bits per byte of a file."""
        encode, decode = codec(self.meta['encoding'])
        stop = how.stop.encode('utf-8', 'surrogateescape')
        if how.score:
            text = read_file(how.score)
        elif how.start.startswith('FILE:'):
            text = read_file(how.start.removeprefix('FILE:')) or b'\n'
        else:
            text = how.start.encode('utf-8', 'surrogateescape') or b'\n'
        tokens = encode(text)
        if max(tokens, default=0) >= self.vocab_size:
            usage(f"this text has token {max(tokens)}, outside the model's vocabulary of {self.vocab_size}")
        if how.score:
            return self.show_score(model, how, tokens)
        if len(tokens) > model.longest:
            print(f"note: of the prompt's {len(tokens)} tokens the model sees the last {model.longest}: "
                  "it has no more positions")
        def ended(out):
            return bool(stop) and stop in decode(out[0, len(tokens):].tolist())
        for _ in range(how.num_samples):
            with how.context:
                out = model.generate(torch.tensor([tokens], device=how.device), how.max_new_tokens,
                                     temperature=how.temperature, top_k=how.top_k, until=ended)
            new = decode(out[0, len(tokens):].tolist())
            if stop:
                new = new.partition(stop)[0]
            print(readable(decode(tokens) + new))
            print('---------------', flush=True)

    def show_score(self, model, how, tokens):
        """Bits per byte of a text but for its first token, in windows of L side by side."""
        if len(tokens) < 2:
            usage(f"score={how.score}: a text of {len(tokens)} tokens has nothing to predict")
        bits = size = 0
        for a in range(0, len(tokens) - 1, self.L):
            row = torch.tensor([tokens[a:a + self.L + 1]])
            nats, _ = score(model, row[:, :-1], row[:, 1:], self.answers, how.device, how.context)
            bits += nats.sum() / math.log(2)
            size += int(self.bytes[row[0, 1:].numpy()].sum(dtype=np.int64))
        print(f"{how.score}: {bits / size:.4f} bits per byte over {size:,} bytes, in windows of {self.L}")

class RowsTask(FolderTask):
    """
    Rows of T + 1 tokens that somebody's prepare.py made (data/synth/prepare.py, for one), the last
    `asked` of them targets, whose answers are among the first `answers` tokens. A file for each test
    length: test_<T>.bin.
    """
    def __init__(self, config, meta, data, checksum):
        super().__init__(config, meta, data, checksum)
        self.answers = meta.get('answers', self.vocab_size)
        self.asked = meta.get('asked', 1)
        _, _, per_row = data['train']
        made_for = per_row - 1
        if made_for != self.L:
            usage(f"dataset={config['dataset']}: its rows are for --block_size={made_for}, not {self.L}")
        if self.lengths != (self.L,):
            usage(f"lengths={commas(self.lengths)}: the rows of {config['dataset']} all have length {self.L}")
        for split in data:
            top = self.tokens(split)[:, -self.asked:].max()
            if top >= self.answers:
                fail(f"data/{config['dataset']}/{split}.bin asks for token {top}, which is none of the "
                     f"{self.answers} answers that its meta.json allows")

    def take(self, split, chosen):
        """Those rows of a file: x (n, T), y (n, asked)."""
        rows = torch.from_numpy(self.tokens(split)[chosen].astype(np.int64))
        return rows[:, :-1], rows[:, -self.asked:]

    def batch(self, seed, it, n):
        """Rows of a file are finite: they are drawn with replacement."""
        return self.take('train', generator(seed, 'train', it).integers(0, len(self.tokens('train')), n))

    def examples(self, split, T, n, seed, longest, k):
        part = f'test_{T}' if split == 'test' else split
        order = generator(seed, split, T).permutation(len(self.tokens(part)))
        return self.take(part, np.sort(order[:n])) # sorted: a file is read from front to back

    def available(self, lengths):
        has = [int(split.removeprefix('test_')) for split in self.data if split.startswith('test_')]
        return tuple(T for T in lengths if T in has), f"it has test files for T = {commas(sorted(has))}"

class MusicTask(TextTask):
    """
    Pieces of music (data/music; notes.py there says what a token is). A window never leaves its piece, so no
    target is predicted from another one. The metric is bits per token.
    """
    metric, unit, per_nat = 'bpt', 'bits per token', 1 / math.log(2)
    uses = ('start', 'num_samples', 'max_new_tokens', 'temperature', 'top_k', 'seed')

    def __init__(self, config, meta, data, checksum):
        FolderTask.__init__(self, config, meta, data, checksum) # not TextTask's, which counts bytes
        self.answers = self.vocab_size
        self.test = 'test' if 'test' in data else 'val'
        self.bytes = np.ones(self.vocab_size, np.uint8) # `values` of a text then counts by token
        for split in ('train', 'val'):
            if self.longest_piece(split) < self.L:
                fail(f"data/{config['dataset']}/{split}.bin: no piece is as long as block_size={self.L}; "
                     f"the longest has {self.longest_piece(split):,} tokens")

    def pieces(self, split):
        """(pieces,) each: where a piece starts, and where it stops, which is where a separator stands."""
        separators = np.flatnonzero(self.tokens(split) == 0) # notes.SEPARATOR
        return separators[:-1] + 1, separators[1:]

    def longest_piece(self, split):
        start, stop = self.pieces(split)
        return int((stop - start).max(initial=0))

    def rows(self, rng, T, n):
        """Any windows of T + 1 tokens that lie in a piece, or in one and the separators around it."""
        start, stop = self.pieces('train')
        # a window is T + 1 tokens of a piece and the separators around it, at start - 1 and at stop
        count = np.maximum(stop + 1 - (start - 1) - T, 0)       # windows in each piece
        upto = np.cumsum(count)                                 # in it and all before it
        drawn = rng.integers(0, upto[-1], n)                    # a window, of all that there are
        piece = np.searchsorted(upto, drawn, side='right')      # where it lies
        still_right = upto[piece] - 1 - drawn                   # windows of its piece that lie right of it
        return self.windows(self.tokens('train'), stop[piece] + 1 - still_right, T, T)

    def examples(self, split, T, n, seed, longest, k):
        """
        Windows that end at the same places for every T up to `longest`: a grid in each piece that is as long
        as that, its offset drawn from the seed. Shorter pieces are not scored at any length, so that what
        differs between two lengths is the context alone.
        """
        rng = generator(seed, split, 0)
        split = self.test if split == 'test' else split
        k = min(k, T)
        ends = []
        for start, stop in zip(*self.pieces(split)):
            room = stop + 1 - (start + longest) # places where a window may end
            if room > 0:
                # from the end of the piece, less an offset, back to where `longest` tokens still fit
                offset = rng.integers(0, min(k, room))
                ends.append(np.arange(stop + 1 - offset, start + longest, -k))
        ends = rng.permutation(np.concatenate(ends))[:n]
        return self.windows(self.tokens(split), np.sort(ends), T, k) # sorted: read from front to back

    def available(self, lengths):
        longest = self.longest_piece(self.test)
        return tuple(T for T in lengths if T <= longest), f"the longest test piece has {longest:,} tokens"

    def show(self, model, how):
        """What sample.py prints and writes: music from nothing, or from the first bars of a test piece."""
        from data.music import notes
        prompt, original = [notes.SEPARATOR], []
        if how.start.startswith('PIECE:'):
            names = self.meta['splits'][self.test].get('pieces', [])
            number = how.start.removeprefix('PIECE:')
            if not (number.isdecimal() and int(number) < len(names)):
                usage(f"start={how.start}: there are the test pieces 0 to {len(names) - 1}")
            start, stop = self.pieces(self.test)
            original = self.tokens(self.test)[start[int(number)]:stop[int(number)]].tolist()
            prompt += original[:self.L]
            print(f"test piece {number}, {names[int(number)]}: the model goes on after {self.L} tokens")
        elif how.start.strip():
            usage(f"start={how.start}: music starts with PIECE:0 or another test piece, or with nothing")
        def ended(out):
            return bool(out[0, -1] == notes.SEPARATOR)
        for n in range(how.num_samples):
            with how.context:
                out = model.generate(torch.tensor([prompt], device=how.device), how.max_new_tokens,
                                     temperature=how.temperature, top_k=how.top_k, until=ended)
            print(f"\nsample {n}")
            path = os.path.join(how.out_dir, f'sample_{n}')
            notes.show(out[0, 1:].tolist(), path, original, prompt=len(prompt) - 1)

# -----------------------------------------------------------------------------

TASKS = {'synth': KernelTask, 'recall': RecallTask} # add yours here; any other name is a folder of data/
FOLDERS = {'stream': TextTask, 'rows': RowsTask, 'music': MusicTask} # by the kind that its meta.json says

def check_task(task):
    """One line where a task of one's own gives what no model can take."""
    name = type(task).__name__
    for key in ('vocab_size', 'answers', 'note'):
        if not hasattr(task, key):
            fail(f"{name} has no {key}: see Task in tasks.py")
    if not hasattr(task, 'rows'): # it has a batch and examples of its own
        return
    x, y = task.rows(generator(0, 'train', 0), task.L, 2)
    for t, shape, low in ((x, 'x (n, T)', 0), (y, 'y (n, k)', -1)):
        whole = torch.is_tensor(t) and not t.is_floating_point() and t.ndim == 2
        if not (whole and low <= t.min() and t.max() < task.vocab_size):
            fail(f"{name}.rows: {shape} must be a tensor of whole numbers from {low} to vocab_size - 1")

def make_task(config):
    """The task of train.py's settings (a dict). If its data are missing or damaged, one line says so."""
    if config['dataset'] in TASKS:
        task = TASKS[config['dataset']](config)
        check_task(task)
        return task
    meta, data, checksum = read_folder(config['dataset'], known=TASKS)
    if meta['kind'] not in FOLDERS:
        known = ', '.join(FOLDERS)
        fail(f"data/{config['dataset']}/meta.json: kind is {meta['kind']!r}, expected one of {known}")
    return FOLDERS[meta['kind']](config, meta, data, checksum)
