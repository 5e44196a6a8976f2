"""
The music: a score is what its tokens say, a MIDI file is what the model wrote, no melody is in two splits,
and no window leaves its piece. What needs music21 is skipped where it is not installed.
"""

import glob
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
import tasks
from data.music import kernel, ngram, notes, prepare
from model import GPTConfig, make_pos

def need_music21():
    return pytest.importorskip('music21', reason='music21 is not installed: pip install music21')

def chorale(seed, steps):
    """Four lists of notes that fill so many steps: random, each voice in its range, with rests."""
    rng, voices = np.random.default_rng(seed), []
    for low, high in ((57, 82), (53, 75), (48, 70), (36, 65)):
        voice, step = [], 0
        while step < steps:
            length = int(min(rng.choice([1, 2, 4, 8]), steps - step))
            # the last step sounds, so that the piece has this length
            if rng.random() < .9 or step + length == steps:
                voice.append((step, length, int(rng.integers(low, high))))
            step += length
        voices.append(voice)
    return voices

# -----------------------------------------------------------------------------
# tokens

def test_a_token_says_what_is_heard():
    """Written by hand: a long note, the same pitch twice, a rest, and silence at the end of one voice."""
    tokens = notes.tokens_of([[(0, 2, 72), (2, 1, 72)], [(1, 2, 65)], [(0, 1, 60)], [(0, 3, 48)]])
    begin, held, rest = notes.begin, notes.held, notes.REST
    assert tokens.reshape(-1, 4).tolist() == [[begin(72), rest, begin(60), begin(48)],
                                              [held(72), begin(65), rest, held(48)],
                                              [begin(72), held(65), rest, held(48)]]
    # every token is another one, inside the vocabulary
    pitches = range(notes.LOW, notes.HIGH)
    every = [notes.SEPARATOR, rest, *map(begin, pitches), *map(held, pitches)]
    assert sorted(every) == list(range(notes.VOCAB))

@pytest.mark.parametrize('seed', range(5))
def test_notes_come_back_in_every_transposition(seed):
    voices = chorale(seed, 150)
    tokens = notes.tokens_of(voices)
    assert len(tokens) == 600 and notes.notes_of(tokens) == voices
    for semitones in prepare.TRANSPOSITIONS:
        moved = notes.notes_of(notes.transpose(tokens.astype(np.uint8), semitones))
        assert moved == [[(a, n, pitch + semitones) for a, n, pitch in voice] for voice in voices]
    with pytest.raises(ValueError):
        notes.transpose(tokens, 40)
    with pytest.raises(ValueError):
        notes.tokens_of([[(0, 1, notes.HIGH)], [], [], []])

def test_what_breaks_the_rules_is_read_still():
    """A model may hold what has not begun, and stop in the middle of a step."""
    begin, held, rest, end = notes.begin, notes.held, notes.REST, notes.SEPARATOR
    row = [held(72), begin(65), rest, rest, held(72), held(66), rest, rest, begin(70)]
    assert notes.notes_of(row) == [[(0, 2, 72)], [(0, 1, 65), (1, 1, 66)], [], []]
    assert notes.notes_of([*row[:4], end, *row]) == [[(0, 1, 72)], [(0, 1, 65)], [], []]
    assert notes.notes_of([]) == notes.notes_of([end]) == [[], [], [], []]

def test_lines_of_note_names():
    text = notes.lines(notes.tokens_of([[(0, 2, 60), (2, 4, 61)], [(1, 5, 57)], [], [(0, 6, 36)]]))
    assert [line.split() for line in text.split('\n')] == [
        ['quarter', '0', '0.25', '0.5'], ['Soprano', 'C4', '-', 'C#4'], ['Alto', '.', 'A3', '-'],
        ['Tenor', '.', '.', '.'], ['Bass', 'C2', '-', '-']]
    long = notes.lines(notes.tokens_of(chorale(0, 200)))
    assert max(map(len, long.split("\n"))) <= 110 and long.count('Soprano') > 2
    assert notes.lines([notes.SEPARATOR]) == '(no notes)'

# -----------------------------------------------------------------------------
# scores

def test_a_score_to_tokens_and_back():
    """Ties become one note, a rest is silence, and what the grid cannot hold is rounded, and counted."""
    need_music21()
    from music21 import note, stream, tie
    soprano = stream.Part(id='Soprano')
    same = [note.Note('C5', quarterLength=length) for length in (1, .5, .5)]
    same[0].tie, same[1].tie = tie.Tie('start'), tie.Tie('stop') # the third is struck again
    soprano.append([*same, note.Rest(quarterLength=1), note.Note('D5', quarterLength=1)])
    alto = stream.Part(id='Alto')
    # a triplet
    alto.append([note.Note(name, quarterLength=Fraction(1, 3)) for name in ('G4', 'A4', 'B4')])
    alto.append(note.Note('C5', quarterLength=3))
    tenor = stream.Part(id='Tenor')
    tenor.append([note.Note('E4').getGrace(), note.Note('E4', quarterLength=4)])
    bass = stream.Part(id='Bass')
    for half in (0, 1): # two measures, so that offsets are those in the piece
        bar = stream.Measure(number=half + 1)
        bar.append(note.Note('C3', quarterLength=2))
        bass.append(bar)
    voices, rounded = notes.read_score(stream.Score([soprano, alto, tenor, bass]))
    assert voices == [[(0, 6, 72), (6, 2, 72), (12, 4, 74)],
                      [(0, 1, 67), (1, 2, 69), (3, 1, 71), (4, 12, 72)],
                      [(0, 16, 64)],
                      [(0, 8, 48), (8, 8, 48)]]
    assert rounded == 4 # the three of the triplet, and the grace note
    assert notes.notes_of(notes.tokens_of(voices)) == voices

def read_midi(path):
    """A reader of standard MIDI files: [(onset, duration, pitch)] of each track that has notes."""
    with open(path, 'rb') as f:
        data = f.read()
    kind, length, _, count, division = struct.unpack('>4sIHHH', data[:14])
    assert (kind, length) == (b'MThd', 6) and division < 2**15
    tracks, at = [], 14
    for _ in range(count):
        kind, length = struct.unpack('>4sI', data[at:at + 8])
        assert kind == b'MTrk'
        at, end = at + 8, at + 8 + length
        now, status, sounding, found = 0, 0, {}, []
        def number():
            nonlocal at
            value = 0
            while True:
                at += 1
                value = value << 7 | data[at - 1] & 127
                if data[at - 1] < 128:
                    return value
        while at < end:
            now += number()
            if data[at] >= 128:
                status, at = data[at], at + 1
            if status >= 240: # meta or system: skip
                at += status == 255
                size = number()
                at += size
                continue
            size = 1 if status >> 4 in (12, 13) else 2
            pitch, velocity, at = data[at], data[at + size - 1], at + size
            if status >> 4 == 9 and velocity:
                assert pitch not in sounding, 'begins twice'
                sounding[pitch] = now
            elif status >> 4 in (8, 9):
                start = sounding.pop(pitch)
                found.append((Fraction(start, division), Fraction(now - start, division), pitch))
        assert at == end and not sounding
        if found:
            tracks.append(sorted(found))
    assert at == len(data)
    return tracks

@pytest.mark.parametrize('seed', range(3))
def test_midi_reads_back_the_same(tmp_path, seed):
    """By a reader of our own: the same notes, onsets and durations, a pitch after itself included."""
    music21 = need_music21()
    voices = chorale(seed, 300)
    voices[0][:2] = [(0, 4, 72), (4, 4, 72)]
    voices[0] = voices[0][:2] + [note for note in voices[0][2:] if note[0] >= 8]
    expected = [[(Fraction(a, 4), Fraction(n, 4), pitch) for a, n, pitch in voice] for voice in voices]
    path = tmp_path / 'a.mid'
    notes.write_midi(notes.tokens_of(voices), path)
    assert read_midi(path) == expected
    score = music21.converter.parse(path, forceSource=True, storePickle=False)
    assert len(score.parts) == 4

# -----------------------------------------------------------------------------
# splits

def test_groups_and_splits():
    """What shares a melody in any key or a title, directly or through others, is in one split."""
    rng = np.random.default_rng(0)
    melodies = [rng.integers(-4, 5, 40).tolist() for _ in range(60)] # intervals, so in every key
    melodies[7][20:35] = melodies[3][:15] # 16 pitches, at another place
    melodies[9][:14] = melodies[3][:14] # 15 pitches are not enough
    titles = [''] * 60
    titles[7], titles[20] = 'O Haupt / Herzlich tut', "Herzlich tut'"
    groups = prepare.groups_of(titles, melodies)
    assert [3, 7, 20] in groups and [9] in groups and len(groups) == 58
    splits = prepare.deal(groups, np.random.default_rng(0))
    assert sorted(sum(splits.values(), [])) == list(range(60))
    assert [len(indices) for indices in splits.values()] == pytest.approx([42, 6, 12], abs=2)
    assert prepare.shared(melodies, splits, 16) == 0
    # the measure sees what it should
    apart = {'train': [n for n in range(60) if n != 7], 'val': [7], 'test': []}
    assert prepare.shared(melodies, apart, 16) == 1 and prepare.shared(melodies, apart, 15) == 2
    # the intervals are the soprano's
    voices = chorale(1, 50)
    assert prepare.melody(notes.tokens_of(voices)) == np.diff([pitch for _, _, pitch in voices[0]]).tolist()

# -----------------------------------------------------------------------------
# the task

SIZES = {'train': [30, 40, 20, 33], 'val': [32, 40], 'test': [90, 30, 64, 100, 63]} # steps

@pytest.fixture
def root(tmp_path):
    """A copy of the scripts whose data/music has made pieces, so that nothing of the user's is touched."""
    for path in glob.glob('*.py', root_dir=REPO) + glob.glob('data/**/*.py', root_dir=REPO, recursive=True):
        os.makedirs(tmp_path / os.path.dirname(path), exist_ok=True)
        shutil.copy(os.path.join(REPO, path), tmp_path / path)
    meta = {}
    for n, (split, sizes) in enumerate(SIZES.items()):
        pieces = [prepare.Piece(f'{split}{i}', 'a title', notes.tokens_of(chorale(10 * n + i, size)))
                  for i, size in enumerate(sizes)]
        tokens = np.concatenate([*prepare.stream(pieces, [0])])
        tokens.astype(np.uint8).tofile(tmp_path / 'data' / 'music' / f'{split}.bin')
        meta[split] = {'tokens': len(tokens), 'pieces': [f'{piece.number} {piece.title}' for piece in pieces]}
    meta = dict(kind='music', vocab_size=notes.VOCAB, dtype='uint8', note='made', splits=meta)
    (tmp_path / 'data' / 'music' / 'meta.json').write_text(json.dumps(meta))
    return tmp_path

def make(root, monkeypatch, L):
    monkeypatch.setattr(sys.modules['data.folder'], 'ROOT', str(root))
    return tasks.make_task(dict(dataset='music', block_size=L, lengths=(), seed=0))

def run(root, *args):
    return subprocess.run([sys.executable, *map(str, args)], cwd=root, capture_output=True,
                          encoding='utf-8', timeout=600)

def test_windows_stay_in_their_piece(root, monkeypatch):
    L = 64
    task = make(root, monkeypatch, L)
    whole = [task.tokens('train')[a - 1:b + 1].tobytes() for a, b in zip(*task.pieces('train'))]
    assert [len(piece) for piece in whole] == [4 * n + 2 for n in SIZES['train']]
    places = set()
    for it in range(200):
        x, y = task.batch(0, it, 8)
        assert x.shape == y.shape == (8, L) and torch.equal(x[:, 1:], y[:, :-1])
        for row in torch.cat((x, y[:, -1:]), dim=1).numpy().astype(np.uint8):
            # in one piece, wherever there is one that is long enough
            at = [(n, piece.find(row.tobytes())) for n, piece in enumerate(whole) if row.tobytes() in piece]
            assert len(at) == 1
            places.add(at[0])
    possible = {(n, a) for n, piece in enumerate(whole) for a in range(len(piece) - L)}
    assert places <= possible and len(places) > .9 * len(possible)
    # a function of seed and iteration
    assert torch.equal(task.batch(3, 5, 8)[0], task.batch(3, 5, 8)[0])
    assert not torch.equal(task.batch(3, 5, 8)[0], task.batch(3, 6, 8)[0])

def test_the_same_targets_at_every_length(root, monkeypatch):
    L, k, longest = 64, 32, 256
    task = make(root, monkeypatch, L)
    assert task.available((64, 256, 400, 401)) == ((64, 256, 400), 'the longest test piece has 400 tokens')
    stream, seen = task.tokens('test'), []
    for T in (64, 128, 256):
        x, y = task.examples('test', T, 1000, 1, longest, k)
        assert x.shape == (len(x), T) and y.shape == (len(x), k)
        seen.append(y)
    assert all(torch.equal(y, seen[0]) for y in seen)
    # every context lies in a piece that has 256 tokens: 90, 64 and 100 steps do, 63 do not
    first, last = task.pieces('test')
    ends = []
    for row in torch.cat((x, y[:, -1:]), dim=1).numpy().astype(np.uint8):
        at = stream.tobytes().find(row.tobytes())
        piece = np.flatnonzero((first <= at) & (at + len(row) <= last + 1))
        assert len(piece) == 1 and piece[0] in (0, 2, 3)
        ends.append(at + len(row))
    # no target is scored twice; as many windows as fit
    assert (np.diff(ends) >= k).all() and {0, 2, 3} == {int(np.searchsorted(last, end - 1)) for end in ends}
    assert 3 + 0 + 4 <= len(ends) <= 4 + 1 + 5
    # another seed, another grid; fewer windows if that is asked
    assert not torch.equal(task.examples('test', 64, 1000, 2, longest, k)[1], seen[0])
    assert len(task.examples('test', 64, 3, 1, longest, k)[0]) == 3
    # the metric: bits per token
    nats = np.full(seen[0].shape, np.log(2) * 3)
    assert task.values(nats, None, seen[0].numpy()) == pytest.approx(np.full(len(nats), 3.0))

def test_no_piece_is_long_enough(root, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        make(root, monkeypatch, 161)
    assert 'block_size=161; the longest has 160 tokens' in capsys.readouterr().err

def test_train_sample_midi(root, here, folders):
    """As a user does it: a model, music that goes on from a test piece, its MIDI file."""
    flags = 'dataset=music block_size=64 n_layer=1 n_embd=32 n_head=2 pos=rope device=cpu batch_size=4'
    flags += ' max_iters=2 warmup_iters=1 eval_iters=4 eval_lens=64,128,256'
    r = here('train.py', *(f'--{flag}' for flag in flags.split()))
    assert r.status == 0 and 'bits per token' in r.out, r.err
    r = here('sample.py', '--start=PIECE:3', '--num_samples=2', '--max_new_tokens=41', '--device=cpu')
    assert r.status == 0, r.err
    assert 'test3 a title' in r.out and r.out.count('Soprano') >= 2
    if importlib.util.find_spec('music21') is None:
        assert 'pip install music21' in r.out and not (root / 'out' / 'sample_0.mid').exists()
    else:
        # the prompt is the original's, and the rest was printed
        voices = chorale(23, 100)
        for n in range(2):
            found = read_midi(root / 'out' / f'sample_{n}.mid')
            for voice, track in zip(voices, found):
                begun = [(Fraction(a, 4), pitch) for a, _, pitch in voice if a < 16]
                assert [(a, pitch) for a, _, pitch in track if a < 4] == begun
            assert max(a + n for track in found for a, n, _ in track) <= Fraction((64 + 41) // 4, 4)
        with open(root / 'out' / 'sample_0.png', 'rb') as f:
            assert f.read(8) == b'\x89PNG\r\n\x1a\n'
    # music from nothing
    r = here('sample.py', '--num_samples=1', '--max_new_tokens=8', '--device=cpu')
    assert r.status == 0 and 'sample 0' in r.out, r.err

@pytest.mark.parametrize('start', ['PIECE:5', 'PIECE:-1', 'PIECE:', 'The sea'])
def test_what_is_no_piece(root, monkeypatch, capsys, start):
    with pytest.raises(SystemExit) as e:
        make(root, monkeypatch, 64).show(None, SimpleNamespace(start=start))
    assert e.value.code == 2 and f'start={start}: ' in capsys.readouterr().err

def run_without_music21(root, script, *args):
    """The same, with a music21 that cannot be imported first on the path."""
    (root / 'music21.py').write_text('raise ImportError')
    code = f"import sys, runpy; sys.argv = {[script, *args]}; runpy.run_path({script!r}, run_name='__main__')"
    return run(root, '-c', code)

def test_without_music21(root):
    """One line that says what to install."""
    r = run_without_music21(root, 'data/music/prepare.py', '--name=other')
    assert r.returncode == 1 and r.stderr.count('\n') == 1 and 'pip install music21' in r.stderr
    show = ("from data.music import notes; notes.show(notes.tokens_of([[(0, 4, 60)], [], [], []]), 'there')")
    r = run(root, '-c', show)
    assert r.returncode == 0 and 'C4' in r.stdout and 'pip install music21' in r.stdout

# -----------------------------------------------------------------------------
# n-grams

def test_ngram_is_a_distribution_and_the_formula():
    """Against the formula written as a recursion over strings, and summed over the vocabulary."""
    V, rng = 5, np.random.default_rng(0)
    train = rng.choice(V - 1, 300, p=[.6, .2, .1, .1]) # token 4 never comes
    text = train.tolist()
    def p(w, h):
        lower = p(w, h[1:]) if h else 1 / V
        follows = [text[i + len(h)] for i in range(len(text) - len(h)) if text[i:i + len(h)] == h]
        if not follows:
            return lower
        kinds = len(set(follows))
        return (follows.count(w) + kinds * lower) / (len(follows) + kinds)
    contexts = [*rng.integers(0, V, (20, 2)).tolist(), [4, 4]]
    rows = np.array([[*h, w] for h in contexts for w in range(V)])
    for m, found in enumerate(ngram.probabilities(train, rows, V, 3), 1):
        expected = [p(w, h[3 - m:]) if m < 3 else p(w, h) for h in contexts for w in range(V)]
        assert np.allclose(found, expected, rtol=1e-12)
        assert np.allclose(found.reshape(-1, V).sum(axis=1), 1)

def test_ngram_command(root, here, folders):
    r = here('data/music/ngram.py', '--n=3', '--block_size=64', '--eval_lens=64,256')
    assert r.status == 0, r.err
    bits = [float(line.split()[1]) for line in r.out.strip().split('\n')[-3:]]
    assert all(2 < b < 8 for b in bits)
    # the windows are the task's
    assert ' windows of 256 tokens' in r.out

# -----------------------------------------------------------------------------
# what a head makes of a lag

@torch.no_grad()
def test_the_kernel_of_one_block_and_its_shear():
    """One block, query (1, 0), key (1, 2): e^{-gamma d} (cos d + 2 eta (d/L) cos d) / sqrt(hs), by hand."""
    config = GPTConfig(pos='jordan_exact', block_size=64, n_head=1, n_embd=4, pos_gamma0=.01, pos_eta0=3.0)
    pos, lags = make_pos(config).double(), torch.arange(200)
    q, k = torch.tensor([[[1., 0, 0, 0]]]).double(), torch.tensor([[[1., 0, 2, 0]]]).double()
    d = lags.double()
    fade = torch.exp(-.01 * d) * torch.cos(d) / 2
    assert torch.allclose(kernel.kernels(pos, q, k, lags)[0], fade * (1 + 6 * d / 64), atol=1e-6)
    assert torch.allclose(kernel.without_shear(pos, q, k, lags)[0, 0], fade, atol=1e-6)
    assert pos.eta().item() == pytest.approx(3) # as it was

def test_the_kernels_of_a_trained_model(root, here, folders):
    """As a user does it: a line for each head, and the picture."""
    flags = 'dataset=music block_size=64 n_layer=2 n_embd=32 n_head=2 pos=jordan_scaled+alibi device=cpu'
    flags += ' max_iters=2 warmup_iters=1 eval_iters=4 eval_lens=64 batch_size=4'
    r = here('train.py', *(f'--{flag}' for flag in flags.split()))
    assert r.status == 0, r.err
    r = here('data/music/kernel.py', '--ckpt=out/ckpt.pt', '--plot=True', '--pairs=8')
    assert r.status == 0, r.err
    assert [line.split()[0] for line in r.out.splitlines()[-5:-1]] == ['0.0', '0.1', '1.0', '1.1']
    assert (root / 'out' / 'kernel.png').exists()

@pytest.mark.parametrize('flags, words', [
    ('--dataset=music --pos=rope --block_size=64', 'no shear'), ('--pos=jordan_exact', 'not on music')])
def test_a_model_without_shear_or_music_has_no_kernel_to_show(root, here, folders, flags, words):
    flags += ' --n_layer=1 --n_embd=32 --n_head=2 --device=cpu --max_iters=1 --eval_iters=4 --batch_size=4'
    r = here('train.py', *flags.split(), '--eval_rows=4', '--eval_lens=64')
    assert r.status == 0, r.err
    r = here('data/music/kernel.py', '--ckpt=out/ckpt.pt')
    assert r.status in (1, 2) and words in r.err and r.err.count('\n') == 1

# -----------------------------------------------------------------------------

@pytest.mark.slow
def test_the_corpus(root):
    """All of it, in half a minute: the counts, no melody in two splits, once more without music21."""
    need_music21()
    r = run(root, 'data/music/prepare.py')
    assert r.returncode == 0, r.stderr
    meta = json.loads((root / 'data' / 'music' / 'meta.json').read_text())
    pieces = {split: len(m['pieces']) for split, m in meta['splits'].items()}
    assert sum(pieces.values()) >= 360 and pieces['train'] >= 240 and pieces['test'] >= 60
    for split, m in meta['splits'].items():
        stream = np.fromfile(root / 'data' / 'music' / f'{split}.bin', np.uint8)
        copies = 12 if split == 'train' else 1
        separators = np.flatnonzero(stream == notes.SEPARATOR)
        assert len(separators) == copies * pieces[split] + 1 and stream[0] == stream[-1] == notes.SEPARATOR
        assert (np.diff(separators) % 4 == 1).all()
    assert '\n 16           0  ' in r.stdout
    before = (root / 'data' / 'music' / 'train.bin').read_bytes()
    r = run_without_music21(root, 'data/music/prepare.py')
    assert r.returncode == 0 and (root / 'data' / 'music' / 'train.bin').read_bytes() == before
