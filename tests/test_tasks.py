"""
What a model is trained on and how it is scored: rows are functions of seed, iteration and length alone;
answers are those of the definition; a metric is what a count by hand gives; intervals cover what they say.
"""

import json
import math
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
import data.folder
import tasks
from data.folder import write_folder
from data.text.codec import readable
from model import GPT, GPTConfig
from tasks import KERNELS, interval, make_task, ratio, score

SETTINGS = dict(block_size=32, kernel='mixed', omega=10000 ** (-6 / 32), kernel_seed=None, lengths=(), seed=0)

def task_of(dataset='synth', **settings):
    return make_task(SETTINGS | dict(dataset=dataset) | settings)

def one_line(capsys, code, *words, **settings):
    """The task of these settings is refused in one line that holds the words."""
    with pytest.raises(SystemExit) as e:
        task_of(**settings)
    err = capsys.readouterr().err
    assert e.value.code == code and err.count('\n') == 1, err
    for word in words:
        assert word in err, err

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/ of a temporary place."""
    monkeypatch.setattr(data.folder, 'ROOT', str(tmp_path))
    return tmp_path / 'data'

def same(a, b):
    return all(torch.equal(left, right) for left, right in zip(a, b))

class Oracle:
    """A model whose logits are a function of the tokens: f(x (n, T), k) -> (n, k, vocab_size)."""
    longest = 10**6

    def __init__(self, vocab_size, f):
        self.config, self.f = SimpleNamespace(vocab_size=vocab_size), f

    def __call__(self, x, y):
        return self.f(x, y.size(1)), None

def measure(task, model, T, n=100, seed=0):
    """The metric as train.py measures it."""
    x, y = task.examples('test', T, n, seed, T, T)
    nats, hits = score(model, x, y, task.answers, 'cpu', nullcontext())
    return task.values(nats, hits, y.numpy()).mean()

# -----------------------------------------------------------------------------
# rows made in memory: synth and recall

MADE = ['synth', 'recall']

@pytest.mark.parametrize('dataset', MADE)
def test_batches_are_functions_of_seed_and_iteration(dataset):
    """Another task, asked for other things before, has the same rows."""
    used = task_of(dataset)
    used.batch(1, 7, 100)
    used.examples('test', 64, 10, 0, 64, 64)
    assert same(used.batch(0, 3, 20), task_of(dataset).batch(0, 3, 20))

@pytest.mark.parametrize('dataset', MADE)
def test_every_seed_iteration_and_split_has_rows_of_its_own(dataset):
    task = task_of(dataset)
    x = [task.batch(seed, it, 50)[0] for seed in (0, 1) for it in (0, 1)]
    x += [task.examples(split, 32, 50, seed, 32, 32)[0] for split in ('val', 'test') for seed in (0, 1)]
    rows = {row.numpy().tobytes() for rows in x for row in rows}
    assert len(rows) == 8 * 50

@pytest.mark.parametrize('dataset', MADE)
def test_more_rows_begin_with_the_same_ones(dataset):
    task = task_of(dataset)
    assert same(task.batch(0, 3, 20), (part[:20] for part in task.batch(0, 3, 700)))
    few, many = (task.examples('test', 64, n, 0, 64, 64) for n in (20, 700))
    assert same(few, (part[:20] for part in many))

@pytest.mark.parametrize('dataset', MADE)
def test_evaluation_rows_do_not_depend_on_the_other_lengths(dataset):
    task = task_of(dataset)
    assert same(task.examples('test', 64, 20, 0, 64, 64), task.examples('test', 64, 20, 0, 256, 16))

@pytest.mark.parametrize('dataset', MADE)
def test_lengths_are_drawn_for_each_iteration(dataset):
    task = task_of(dataset, block_size=64, lengths=(32, 48, 64))
    lengths = [task.batch(0, it, 3)[0].shape[1] for it in range(300)]
    counts = [lengths.count(T) for T in (32, 48, 64)]
    assert sum(counts) == 300 and min(counts) > 70
    assert task.note.endswith('lengths=32,48,64')

@pytest.mark.parametrize('lengths', [(1,), (33,), (16, 64), (-4,)])
def test_lengths_that_cannot_be_are_one_line(capsys, lengths):
    one_line(capsys, 2, 'expected 2 <= T <= block_size=32', lengths=lengths)

def test_a_block_that_is_too_short_is_one_line(capsys):
    one_line(capsys, 2, 'block_size=15: a row of recall has at least 16', dataset='recall', block_size=15)

@pytest.mark.parametrize('dataset', MADE)
def test_tokens_and_answers_lie_in_the_vocabulary(dataset):
    task = task_of(dataset)
    x, y = task.batch(0, 0, 200)
    assert (x.max() < task.vocab_size) and (y.max() < task.answers) and y.dtype == torch.int64

# -----------------------------------------------------------------------------
# synth

def grid(n):
    return 10000 ** (-2 * n / 32) # frequency n of a head of 32

def cos(n, d):
    return math.cos(grid(n) * d)

def sin(n, d):
    return math.sin(grid(n) * d)

# by hand, at L = 32 and omega = grid(3); grid(5) is two steps further
BY_HAND = {
    'mixed': lambda d: d / 32 * cos(3, d),
    'phase': lambda d: cos(3, d),
    'linear': lambda d: -d / 32,
    'damped_wave': lambda d: math.exp(-.0001 * d) * (cos(3, d) + .75 * d / 32 * sin(3, d)),
    'phase_drift': lambda d: cos(3, 1.00005 * d),
    'seasonal': lambda d: (.35 + .9 * d / 32) * cos(3, d) + .25 * sin(3, d),
    'rhythm': lambda d: (.25 + .85 * d / 32) * (.65 * cos(3, d) + .35 * sin(5, d)),
    'motif': lambda d: d / (32 + d / 4) * (.7 * cos(5, d) - .3 * sin(5, d)),
    'decay': lambda d: math.exp(-d / 32) * cos(3, d),
    'jet_2': lambda d: (d / 32) ** 2 * cos(3, d),
    'jet_3': lambda d: (d / 32) ** 3 * cos(3, d),
    'high_jet_1': lambda d: d / 32 * math.exp(-.1 * d / 32) * cos(3, d),
    'high_jet_2': lambda d: (d / 32) ** 2 * math.exp(-.1 * d / 32) * cos(3, d),
    'high_jet_3': lambda d: (d / 32) ** 3 * math.exp(-.1 * d / 32) * cos(3, d),
}

def assert_answers(task, K, T):
    """Row by row, lag by lag: bit T - 1 - d is d tokens before QUERY."""
    x, y = task.examples('test', T, 60, 0, T, T)
    for row, answer in zip(x.tolist(), y[:, 0].tolist()):
        total = math.fsum(K(d) * (2 * row[T - 1 - d] - 1) for d in range(1, T))
        assert row[T - 1] == 2 and set(row[:T - 1]) <= {0, 1}
        assert answer == (total > 1e-9)

def test_every_kernel_is_written_by_hand_here():
    assert BY_HAND.keys() == KERNELS.keys()

@pytest.mark.parametrize('T', [2, 32, 100])
@pytest.mark.parametrize('kernel', BY_HAND)
def test_synth_answers_are_those_of_the_definition(kernel, T):
    assert_answers(task_of(kernel=kernel), BY_HAND[kernel], T)

def test_the_teacher_by_lag_is_K():
    d = np.arange(1, 300)
    assert np.allclose(task_of().K(d), [BY_HAND['mixed'](int(n)) for n in d])

def test_a_tie_is_0_whatever_the_order_of_the_sum():
    """-d/L with L = 30 is no binary fraction: sums that should be 0 come out as noise of either sign."""
    task = task_of(kernel='linear', block_size=30)
    x, y = task.examples('test', 8, 5000, 0, 8, 8)
    lags = np.arange(7, 0, -1)
    totals = (2 * x[:, :7].numpy().astype(int) - 1) @ -lags
    assert (totals == 0).sum() > 100
    assert (y[:, 0].numpy() == (totals > 0)).all()

def test_both_answers_are_as_likely():
    y = task_of().examples('test', 256, 4000, 0, 256, 1)[1]
    assert abs(y.double().mean() - .5) < .03

def test_a_random_kernel_is_a_function_of_the_seed():
    d = np.arange(1, 100)
    a, again, b = (task_of(kernel='random', seed=seed).K(d) for seed in (0, 0, 1))
    assert (a == again).all() and not np.allclose(a, b)

def test_a_random_kernel_can_be_the_same_for_every_seed():
    d = np.arange(1, 100)
    a, b = (task_of(kernel='random', seed=seed, kernel_seed=5) for seed in (0, 1))
    assert (a.K(d) == b.K(d)).all() and a.note == 'random kernel 5'

@pytest.mark.parametrize('L', [4, 8, 32, 100])
def test_a_random_kernel_answers_by_its_own_definition(L):
    task = task_of(kernel='random', block_size=L)
    assert_answers(task, task.K, L)

@pytest.mark.parametrize('kernel, has, has_not', [
    ('mixed', 'omega', 'kernel_seed'),
    ('random', 'kernel_seed', 'omega')])
def test_synth_names_the_settings_that_have_an_effect(kernel, has, has_not):
    settings = task_of(kernel=kernel).settings
    assert has in settings and has_not not in settings

def test_an_unknown_kernel_is_one_line(capsys):
    one_line(capsys, 2, "kernel='mixd'", 'mixed', 'random', kernel='mixd')

def test_one_who_knows_the_teacher_is_always_right():
    task = task_of()
    def answer(x, k):
        bits = 2 * x[:, :-1].double() - 1
        total = bits @ torch.from_numpy(task.K(np.arange(x.size(1) - 1, 0, -1)))
        return torch.stack((-total, total, torch.full_like(total, 9e9)), dim=1)[:, None] # QUERY is no answer
    assert measure(task, Oracle(3, answer), 256) == 1

# -----------------------------------------------------------------------------
# recall

def recall_by_lookup(x, k):
    """The value of the token in the row that has this key."""
    logits = torch.zeros(len(x), k, 45)
    for row, tokens in enumerate(x.tolist()):
        values = {(token - 4) // 4: (token - 4) % 4 for token in tokens if 4 <= token < 36}
        for n, token in enumerate(tokens[-k:]):
            logits[row, n, values[token - 36]] = 1
    return logits

@pytest.mark.parametrize('T', [16, 32, 100, 257])
def test_recall_is_solved_by_looking_up(T):
    assert measure(task_of('recall'), Oracle(45, recall_by_lookup), T) == 1

def test_recall_cannot_be_solved_without_looking():
    blind = Oracle(45, lambda x, k: torch.zeros(len(x), k, 45))
    assert abs(measure(task_of('recall'), blind, 64, 500) - 1 / 4) < .03

def test_recall_has_every_key_once_and_asks_it_once():
    x, y = task_of('recall').batch(0, 0, 50)
    planted = ((x[:, :-8] - 4) // 4)[x[:, :-8] < 44].reshape(50, 8)
    assert (planted.sort(dim=1).values == torch.arange(8)).all()
    assert (x[:, -8:].sort(dim=1).values == torch.arange(36, 44)).all() and y.shape == (50, 8)

def test_recall_distances_spread_over_the_row():
    T = 400
    x, _ = task_of('recall').examples('test', T, 300, 0, T, T)
    keys, questions = (x.long()[:, None, :] - 4) // 4, x.long()[:, -8:, None] - 36
    planted = (keys == questions).int().argmax(dim=2)
    distance = (T - 8 + torch.arange(8) - planted).double()
    tenths = torch.histc(distance / T, 10, 0, 1)
    assert (tenths > .7 * tenths.mean()).all()

@pytest.mark.parametrize('wrong', ['numpy', 'floats', 'one-dimensional y', 'a token too many', 'no note'])
def test_a_task_of_ones_own_that_is_wrong_is_one_line(monkeypatch, capsys, wrong):
    class Mine(tasks.Task):
        vocab_size, answers = 4, 4
        def __init__(self, config):
            if wrong != 'no note':
                self.note = 'mine'
            super().__init__(config)
        def rows(self, rng, T, n):
            x, y = torch.zeros(n, T).long(), torch.zeros(n, 1).long()
            return {'numpy': (x.numpy(), y), 'floats': (x, y.float()), 'one-dimensional y': (x, y[:, 0]),
                    'a token too many': (x + 4, y)}.get(wrong, (x, y))
    monkeypatch.setitem(tasks.TASKS, 'mine', Mine)
    words = 'note' if wrong == 'no note' else 'whole numbers'
    one_line(capsys, 1, 'Mine', words, dataset='mine')

# -----------------------------------------------------------------------------
# text

@pytest.fixture
def counting(folder):
    """A stream whose token at each place is the place, so that a window says where it lies."""
    def make(N=5000, **more):
        splits = {'train': N, 'val': N} | more
        meta = dict(kind='stream', vocab_size=10**5, dtype='uint32', encoding='places', note='counting')
        blocks = {split: [np.arange(n)] for split, n in splits.items()}
        write_folder('counting', blocks, meta, token_bytes=np.ones(10**5, int))
        return task_of('counting')
    return make

def test_a_window_is_followed_by_its_targets(counting):
    x, y = counting().batch(0, 0, 50)
    assert x.shape == y.shape == (50, 32) and (y == x + 1).all()

def test_training_windows_reach_both_ends_of_the_text(counting):
    task = counting(40)
    x, y = task.batch(0, 0, 500)
    assert x.min() == 0 and y.max() == 39

def test_targets_are_the_same_at_every_length(counting):
    task = counting()
    targets = [task.examples('test', T, 20, 0, 256, 16)[1] for T in (32, 64, 128, 256)]
    assert all(torch.equal(targets[0], y) for y in targets[1:])

@pytest.mark.parametrize('N, n', [(300, 1000), (5000, 20), (5000, 10**6), (258, 5)])
def test_no_target_is_scored_twice_and_none_lies_outside(counting, N, n):
    task = counting(5000, test=N)
    for seed in range(20):
        x, y = task.examples('test', 256, n, seed, 256, 16)
        assert len(x) <= n and y.unique().numel() == y.numel() and x.min() >= 0 and y.max() < N

def test_windows_are_moved_by_the_seed(counting):
    task = counting()
    first = [int(task.examples('test', 64, 20, seed, 256, 16)[1][0, 0]) for seed in range(20)]
    assert len(set(first)) > 15

def test_windows_are_spread_over_the_text(counting):
    y = counting().examples('test', 64, 20, 0, 256, 16)[1]
    assert y.max() - y.min() > 4400

def test_without_a_test_text_it_is_the_validation_text(counting):
    assert counting().note == 'counting test=val' and counting(test=4000).note == 'counting'

def test_text_says_which_lengths_it_has(counting):
    lengths, why = counting(test=300).available((32, 256, 299, 300, 512))
    assert lengths == (32, 256, 299) and why == 'test.bin has 300 tokens'

@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_text_that_is_too_short_for_a_window_is_one_line(folder, capsys, split):
    sizes = {'train': 100, 'val': 100} | {split: 32}
    meta = dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes')
    write_folder('short', {split: [np.zeros(n, int)] for split, n in sizes.items()}, meta)
    capsys.readouterr()
    one_line(capsys, 1, f'{split}.bin has 32 tokens', 'block_size=32', dataset='short')

def test_bits_per_byte_of_a_fair_die_are_8(folder):
    splits = {split: [np.random.default_rng(0).integers(0, 256, 2000)] for split in ('train', 'val')}
    meta = dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes')
    write_folder('die', splits, meta)
    task = task_of('die')
    assert measure(task, Oracle(256, lambda x, k: torch.zeros(len(x), k, 256)), 64) == pytest.approx(8)
    assert math.log(256) * task.per_nat == pytest.approx(8)

@pytest.fixture
def bpe(monkeypatch):
    """A small vocabulary in the place of GPT-2's: bytes, and ` the`."""
    ranks = {bytes([b]): b for b in range(256)}
    for merge in (b'th', b'the', b' the'):
        ranks[merge] = len(ranks)
    encoding = tiktoken.Encoding('gpt2', pat_str=r' ?\w+|\s', mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: encoding)
    return encoding

@pytest.fixture
def skewed(folder, bpe):
    """Trained on `the`, 4 bytes a token; measured on words of one byte a token."""
    texts = {'train': ' the' * 500, 'val': ' xylophones' * 50, 'test': ' the' * 100 + ' quartz jinx' * 100}
    tokens = {split: bpe.encode_ordinary(text) for split, text in texts.items()}
    meta = dict(kind='stream', vocab_size=bpe.n_vocab, dtype='uint16', encoding='gpt2')
    lengths = [len(bpe.decode_bytes([token])) for token in range(bpe.n_vocab)]
    write_folder('skewed', {split: [t] for split, t in tokens.items()}, meta, lengths)
    return folder / 'skewed'

def test_bits_per_byte_count_the_bytes_of_the_tokens_scored(skewed, bpe):
    task = task_of('skewed')
    y = task.examples('test', 64, 10, 0, 64, 16)[1].numpy()
    nats = np.random.default_rng(0).random(y.shape)
    size = sum(len(bpe.decode_bytes(row.tolist())) for row in y)
    want = nats.sum() / math.log(2) / size
    got = task.values(nats, nats > 2, y).mean()
    assert got == pytest.approx(want, rel=1e-12)
    # by the training text's four bytes a token it would be far off
    assert abs(nats.mean() * task.per_nat / want - 1) > .1

def test_without_the_bytes_of_tokens_it_is_one_line(skewed, capsys):
    capsys.readouterr()
    for change in ('shorter', 'damaged', 'empty', 'missing'):
        file = skewed / 'token_bytes.npy'
        if change == 'shorter':
            np.save(file, np.ones(10))
        elif change == 'missing':
            file.unlink()
        else:
            file.write_bytes(b'no array' if change == 'damaged' else b'')
        one_line(capsys, 1, 'token_bytes.npy', 'run its prepare.py again', dataset='skewed')

def test_identity_has_the_bytes_of_tokens(skewed):
    before = task_of('skewed').checksum
    np.save(skewed / 'token_bytes.npy', np.load(skewed / 'token_bytes.npy') + 1)
    assert task_of('skewed').checksum != before

# -----------------------------------------------------------------------------
# rows of somebody's own

def eight(n, T):
    """Rows of 8 symbols; the last three repeat the first three."""
    rows = np.random.default_rng(T).integers(0, 8, (n, T + 1))
    rows[:, -3:] = rows[:, :3]
    return rows

@pytest.fixture
def rows(folder):
    def make(**meta):
        meta = dict(kind='rows', vocab_size=8, answers=8, asked=3, dtype='uint8', lengths=[12, 24]) | meta
        sizes = {'train': 12, 'val': 12, 'test_12': 12, 'test_24': 24}
        write_folder('mine', {split: [eight(50, T)] for split, T in sizes.items()}, meta)
        return task_of('mine', block_size=12)
    return make

def test_rows_are_those_of_the_file(rows):
    task = rows()
    x, y = task.batch(0, 0, 40)
    lines = {row.tobytes() for row in eight(50, 12)}
    assert x.shape == (40, 12) and y.shape == (40, 3)
    assert all(row.astype(np.int64).tobytes() in lines for row in torch.cat((x, y[:, -1:]), dim=1).numpy())

def test_test_rows_are_nested_and_none_comes_twice(rows):
    task = rows()
    few, all_of_them = (task.examples('test', 24, n, 0, 24, 24)[0] for n in (10, 1000))
    few, all_of_them = ({row.numpy().tobytes() for row in x} for x in (few, all_of_them))
    assert len(few) == 10 and len(all_of_them) == 50 and few < all_of_them

def test_rows_drawn_depend_on_seed_and_iteration(rows):
    task = rows()
    batch = task.batch(0, 3, 20)
    assert same(batch, task.batch(0, 3, 20))
    assert not same(batch, task.batch(0, 4, 20)) and not same(batch, task.batch(1, 3, 20))

def test_accuracy_over_eight_answers_and_three_targets_is_a_count_by_hand(rows):
    def guess(x, k): # the first three, but 7 where it should be 6
        first = x[:, :3].clone()
        first[first == 6] = 7
        return torch.nn.functional.one_hot(first, 8).double()
    want = (eight(50, 24)[:, :3] != 6).mean()
    assert measure(rows(), Oracle(8, guess), 24) == pytest.approx(want)

def test_a_target_that_is_no_answer_is_one_line(folder, rows, capsys):
    rows()
    meta = json.loads((folder / 'mine/meta.json').read_text())
    (folder / 'mine/meta.json').write_text(json.dumps(meta | {'answers': 2}))
    capsys.readouterr()
    one_line(capsys, 1, 'asks for token 7', '2 answers', dataset='mine', block_size=12)

def test_rows_say_which_lengths_they_have(rows):
    assert rows().available((12, 24, 48, 96)) == ((12, 24), 'it has test files for T = 12,24')

def test_rows_of_another_length_are_one_line(rows, capsys):
    rows()
    capsys.readouterr()
    one_line(capsys, 2, 'its rows are for --block_size=12, not 32', dataset='mine', block_size=32)
    one_line(capsys, 2, 'all have length 12', dataset='mine', block_size=12, lengths=(6,))

def test_a_kind_that_nobody_knows_is_one_line(folder, rows, capsys):
    rows()
    meta = json.loads((folder / 'mine/meta.json').read_text())
    meta['splits'] = {split: {'tokens': 650 if '24' not in split else 1250} for split in meta['splits']}
    (folder / 'mine/meta.json').write_text(json.dumps(meta | {'kind': 'pictures'}))
    capsys.readouterr()
    one_line(capsys, 1, "kind is 'pictures'", 'stream, rows', dataset='mine', block_size=12)

# -----------------------------------------------------------------------------
# scoring

def test_score_is_cross_entropy_and_argmax_of_the_model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16, pos='rope')).eval()
    x, y = torch.randint(0, 11, (7, 16)), torch.randint(0, 11, (7, 5))
    nats, hits = score(model, x, y, 4, 'cpu', nullcontext())
    logits = model(x, torch.cat((x[:, 1:], y[:, -1:]), dim=1))[0].detach()[:, -5:]
    want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction='none')
    assert np.allclose(nats, want.numpy(), atol=1e-5)
    assert (hits == (logits[..., :4].argmax(dim=-1) == y).numpy()).all()

def test_score_does_not_depend_on_the_rows_beside_it(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16, pos='rope')).eval()
    x, y = torch.randint(0, 11, (7, 16)), torch.randint(0, 11, (7, 5))
    whole = score(model, x, y, 11, 'cpu', nullcontext())
    monkeypatch.setattr(tasks, 'TOKENS_PER_FORWARD', 32)
    pieces = score(model, x, y, 11, 'cpu', nullcontext())
    assert np.allclose(whole[0], pieces[0], atol=1e-6) and (whole[1] == pieces[1]).all()

def test_what_is_not_asked_never_counts():
    x, y = torch.zeros(4, 8, dtype=torch.long), torch.tensor([[1, -1], [0, -1], [-1, 1], [-1, -1]])
    logits = torch.tensor([0., 1., -9.])
    nats, hits = score(Oracle(3, lambda x, k: logits.expand(len(x), k, 3)), x, y, 2, 'cpu', nullcontext())
    assert (nats[y < 0] == 0).all() and not hits[y < 0].any()
    assert task_of().values(nats, hits, y.numpy()).mean() == pytest.approx(2 / 3)

# -----------------------------------------------------------------------------
# intervals

@pytest.mark.parametrize('hits, n, lo, hi', [ # by hand; the last is an example of Newcombe (1998)
    (0, 10, 0, .2775), (5, 10, .2366, .7634), (9, 10, .5958, .9821), (10, 10, .7225, 1),
    (81, 263, .2553, .3662)])
def test_right_or_wrong_has_wilsons_interval(hits, n, lo, hi):
    values = np.arange(n) < hits
    assert interval(values.astype(float)) == pytest.approx((lo, hi), abs=1e-4)

def test_the_mean_of_a_ratio_is_the_ratio_of_the_sums():
    rng = np.random.default_rng(0)
    a, b = rng.random(100), rng.integers(1, 9, 100)
    assert ratio(a, b).mean() == pytest.approx(a.sum() / b.sum(), rel=1e-14)

def test_a_ratio_with_equal_parts_is_left_alone():
    assert (ratio(np.array([0, 4, 8]), np.array([8, 8, 8])) == [0, .5, 1]).all()

def windows(rng, n):
    """Nats and bytes of n windows that depend on each other, as those of a text do."""
    size = rng.lognormal(4, .3, n)
    return size * rng.lognormal(0, .2, n) * .7, size

def test_the_interval_of_a_ratio_is_that_of_resampled_pairs():
    rng = np.random.default_rng(0)
    a, b = windows(rng, 200)
    draws = rng.integers(0, 200, (20000, 200))
    want = np.quantile(a[draws].sum(axis=1) / b[draws].sum(axis=1), [.025, .975])
    assert interval(ratio(a, b)) == pytest.approx(want, abs=.06 * (want[1] - want[0]))

def test_the_interval_is_the_same_again():
    values = np.random.default_rng(0).random(50)
    assert interval(values) == interval(values)

def test_one_window_has_no_interval():
    assert all(map(math.isnan, interval(np.array([1.7]))))

@pytest.mark.slow
@pytest.mark.parametrize('n', [30, 250])
def test_the_interval_of_a_ratio_covers_the_truth_in_19_of_20(n):
    rng = np.random.default_rng(n)
    a, b = windows(rng, 10**6)
    truth, covered = a.sum() / b.sum(), 0
    for _ in range(400):
        lo, hi = interval(ratio(*windows(rng, n)), resamples=300)
        covered += lo <= truth <= hi
    assert .90 <= covered / 400 <= .98

# -----------------------------------------------------------------------------
# what sample.py prints

def how(**settings):
    usual = dict(num_samples=2, seed=0, start='', stop='', score='', max_new_tokens=8)
    usual |= dict(temperature=1.0, top_k=0)
    return SimpleNamespace(**usual | settings, device='cpu', context=nullcontext())

def test_rows_are_shown_at_every_length_with_the_truth(capsys):
    task = task_of()
    task.show(Oracle(3, lambda x, k: torch.tensor([0., 2., 0.]).expand(len(x), k, 3)), how(num_samples=3))
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if '?' in line]
    assert [f'T = {T}' in ''.join(lines) for T in (32, 64, 128, 256)] == [True] * 4 and len(shown) == 12
    assert all((answer == '0') == bool(wrong) for _, answer, _, *wrong in shown)

def test_recall_is_shown(capsys):
    task_of('recall').show(Oracle(45, recall_by_lookup), how())
    assert 'accuracy 1.000' in capsys.readouterr().out

def test_rows_without_a_length_to_show_say_so(rows, capsys):
    task = rows()
    del task.data['test_12'], task.data['test_24']
    task.show(Oracle(8, None), how())
    assert 'no rows to show' in capsys.readouterr().out

@pytest.fixture
def book(folder):
    text = 'z\u00fcrich am see\n'.encode() * 20
    meta = dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes')
    write_folder('book', {split: [np.frombuffer(text, np.uint8)] for split in ('train', 'val')}, meta)
    return task_of('book')

class Parrot(Oracle):
    """Goes on with the same words, a token at a time."""
    longest = 10

    def __init__(self, words):
        super().__init__(256, lambda x, k: torch.zeros(len(x), k, 256))
        self.words = words

    def generate(self, idx, n, temperature, top_k, until):
        for token in self.words[:n]:
            idx = torch.cat((idx, torch.tensor([[token]])), dim=1)
            if until(idx):
                break
        return idx

def test_a_text_begins_with_its_prompt(book, capsys):
    book.show(Parrot(b' am see'), how(start='Z\u00fcrich'))
    assert capsys.readouterr().out == 'Z\u00fcrich am see\n---------------\n' * 2

def test_a_prompt_from_a_file(book, capsys, tmp_path):
    (tmp_path / 'prompt.txt').write_bytes('\u65e5'.encode())
    book.show(Parrot(b'!'), how(start=f'FILE:{tmp_path}/prompt.txt', num_samples=1))
    assert capsys.readouterr().out == '\u65e5!\n---------------\n'

def test_a_text_ends_before_stop(book, capsys):
    book.show(Parrot(b'ab.cd'), how(start='x', stop='.', num_samples=1))
    assert capsys.readouterr().out == 'xab\n---------------\n'

def test_a_prompt_that_is_too_long_is_said(book, capsys):
    book.show(Parrot(b'a'), how(start='x' * 12, num_samples=1))
    assert "of the prompt's 12 tokens the model sees the last 10" in capsys.readouterr().out

def test_a_file_is_scored_but_for_its_first_byte(book, capsys, tmp_path):
    (tmp_path / 'file.txt').write_bytes(bytes(range(101)))
    book.show(Parrot(b''), how(score=f'{tmp_path}/file.txt'))
    assert '8.0000 bits per byte over 100 bytes' in capsys.readouterr().out

@pytest.mark.parametrize('what', ['start', 'score'])
def test_a_text_outside_the_vocabulary_is_one_line(book, capsys, tmp_path, what):
    (tmp_path / 'file.txt').write_bytes('\u00e9'.encode())
    book.vocab_size = 128
    with pytest.raises(SystemExit):
        book.show(Parrot(b''), how(**{what: '\u00e9' if what == 'start' else f'{tmp_path}/file.txt'}))
    assert "has token 195, outside the model's vocabulary of 128" in capsys.readouterr().err

@pytest.mark.parametrize('settings', [dict(score='gone.txt'), dict(start='FILE:gone.txt')])
def test_a_missing_file_is_one_line(book, capsys, settings):
    capsys.readouterr()
    with pytest.raises(SystemExit):
        book.show(Parrot(b''), how(**settings))
    err = capsys.readouterr().err
    assert 'gone.txt: No such file' in err and err.count('\n') == 1

def test_bytes_that_are_no_text_are_shown_as_such():
    assert readable(b'a\r\n\xff\x1b[31mz\xc3\xbc\t') == 'a\n\ufffd\ufffd[31mz\u00fc\t'
