"""
Bach's four-part chorales as tokens, from music21's corpus.

    pip install music21
    python data/music/prepare.py      # half a minute; scores.npz beside it keeps what was read
    python train.py config/music.py

notes.py says what a token is. Pieces that may be the same hymn stay in one split: those that share a title,
or 16 pitches of the soprano in a row, anywhere and up to transposition (Bach set the same melody many
times). 70% of the pieces are for training, 10% for validation, 20% for testing; what is the same to the
note counts once. Training pieces come in twelve transpositions, 5 semitones down to 6 up; validation and
test pieces as they stand.

Licence. music21 is BSD, the scores in it are not part of that. Its corpus/license.txt says that they come
with the permission of those who encoded them, that some may not be used commercially or have other
restrictions, and that whoever uses them sees to the law of their country. The files of the chorales say
"PDF (c) 2004 Margaret Greentree", most of them "used by permission". So nothing of the corpus is in this
repository: it is read from your own copy of music21, and what is made of it stays in data/music, where git
ignores it. Three chorales in another format (.krn) reserve all rights; they are there twice, and are not
read from these files.
"""

import os
import sys
import time
from collections import namedtuple

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure # first: it makes Ctrl-C one line
from common import fail
from data.folder import folder_of, write_folder
from data.music import notes

# -----------------------------------------------------------------------------
name = 'music' # the folder under data/
max_scores = 0 # read only the first so many, to try it out; 0: all
split_seed = 0 # which groups of pieces are for training
again = False # read the corpus once more, even if scores.npz has it
# -----------------------------------------------------------------------------
if __name__ == '__main__':
    configure(globals(), {'x >= 0': 'max_scores split_seed',
                          "x and all(c.isalnum() or c in '-_' for c in x)": 'name'})

GRAM = 16 # pitches in a row of the soprano by which a melody is known
SHARES = {'train': .7, 'val': .1, 'test': .2} # of the pieces
TRANSPOSITIONS = range(-5, 7) # semitones
Piece = namedtuple('Piece', 'number title tokens')

# -----------------------------------------------------------------------------
# scores

def read_corpus():
    """The chorales, a list of Piece, and in words what was left out or rounded."""
    try:
        from music21 import converter, corpus
    except ImportError:
        fail("music21 is not installed, and the chorales are in its corpus: pip install music21")
    paths = sorted(str(path) for path in corpus.getComposer('bach') if str(path).endswith(('.mxl', '.xml')))
    if max_scores:
        paths = paths[:max_scores]
    titles, t0 = titles_by_number(), time.time()
    pieces, seen, other, double, rounded = [], set(), 0, 0, []
    for n, path in enumerate(paths, 1):
        score = converter.parse(path, forceSource=True, storePickle=False)
        if n % 50 == 0 or n == len(paths):
            print(f"{n:5} of {len(paths)} files read, {time.time() - t0:.0f} s", flush=True)
        # the others have instruments, or a second soprano
        if [part.partName for part in score.parts] != list(notes.VOICES):
            other += 1
            continue
        voices, changed = notes.read_score(score)
        # the same piece once more, perhaps in another key? Pitches are compared from the soprano's first
        first = voices[0][0][2]
        key = str([[(start, length, pitch - first) for start, length, pitch in voice] for voice in voices])
        if key in seen:
            double += 1
            continue
        seen.add(key)
        number = os.path.basename(path)[3:-4]
        pieces.append(Piece(f'bwv{number}', titles.get(number, ''), notes.tokens_of(voices)))
        if changed:
            rounded.append(changed)
    says = (f"{len(pieces)} pieces from {len(paths)} files: {other} have other parts than the four voices, "
            f"{double} the same as another to the note;\n{sum(rounded)} notes of {len(rounded)} pieces begin "
            "or end between two sixteenths and were rounded, or are grace notes and were left out")
    return pieces, says

def titles_by_number():
    """
    {'267': 'An Wasserflüssen Babylon / Ein Lämmlein geht und trägt die Schuld'}: titles by BWV number from
    music21's two lists, which may differ. The scores themselves name none, and some numbers are in neither
    list.
    """
    from music21.corpus import chorales
    titles = {}
    for entries in (chorales.ChoraleList().byBudapest, chorales.ChoraleListRKBWV().byRiemenschneider):
        for entry in entries.values():
            for title in entry['title'].split(' / '):
                known = titles.setdefault(str(entry['bwv']), [])
                if plain(title) not in map(plain, known):
                    known.append(title)
    return {number: ' / '.join(known) for number, known in titles.items()}

def plain(title):
    """Letters alone: the lists write apostrophes in two ways."""
    return ''.join(c for c in title.casefold().replace('ß', 'ss') if c.isalpha())

def read_once():
    """The same from scores.npz, which keeps it."""
    path = os.path.join(folder_of(name), 'scores.npz')
    if os.path.exists(path) and not again and not max_scores:
        try:
            with np.load(path) as f:
                tokens = np.split(f['tokens'], np.cumsum(f['sizes'])[:-1])
                pieces = [Piece(*piece) for piece in zip(f['numbers'].tolist(), f['titles'].tolist(), tokens)]
                says = str(f['says'])
            print(f"data/{name}/scores.npz has the scores; --again=True reads music21's corpus once more")
            return pieces, says
        except Exception as e: # of zip, of numpy, or a key
            print(f"data/{name}/scores.npz is damaged ({type(e).__name__}): reading the corpus")
    pieces, says = read_corpus()
    if not max_scores:
        numbers, titles, tokens = zip(*pieces)
        os.makedirs(folder_of(name), exist_ok=True)
        np.savez_compressed(path, numbers=numbers, titles=titles, sizes=[len(t) for t in tokens],
                            tokens=np.concatenate(tokens).astype(np.uint8), says=says)
    return pieces, says

# -----------------------------------------------------------------------------
# splits

def melody(tokens):
    """The intervals between the soprano's pitches, which are the same in every key."""
    return np.diff([pitch for _, _, pitch in notes.notes_of(tokens)[0]]).tolist()

def grams(melody, n):
    """The set of all n pitches in a row, as n - 1 intervals."""
    return {tuple(melody[a:a + n - 1]) for a in range(len(melody) - n + 2)}

def groups_of(titles, melodies):
    """Lists of indices: pieces that share a title or 16 pitches in a row, directly or through others."""
    group, first = list(range(len(titles))), {}
    for n, (title, intervals) in enumerate(zip(titles, melodies)):
        names = {plain(one) for one in title.split(' / ')} - {''}
        for feature in names | grams(intervals, GRAM):
            # the group of this piece and that of the first that has this feature become one
            one, other = sorted((group[n], group[first.setdefault(feature, n)]))
            group = [one if g == other else g for g in group]
    return [[n for n, g in enumerate(group) if g == label] for label in sorted(set(group))]

def deal(groups, rng):
    """{split: indices}: the groups in random order, to training until it has its share, then to the next."""
    splits, have = {split: [] for split in SHARES}, 0
    bounds = np.cumsum(list(SHARES.values()))[:-1] * sum(map(len, groups))
    for g in rng.permutation(len(groups)):
        # where the middle of the group falls
        split = list(SHARES)[np.searchsorted(bounds, have + len(groups[g]) / 2)]
        splits[split] += groups[g]
        have += len(groups[g])
    return splits

def shared(melodies, splits, n):
    """How many different n pitches in a row are in more than one split."""
    sets = [set().union(*(grams(melodies[i], n) for i in indices)) for indices in splits.values()]
    return sum(map(len, sets)) - len(set().union(*sets))

def check(melodies, groups, splits):
    """
    What melodies the splits share: no 16 pitches, by construction. Fewer pitches are shared by different
    hymns, too; how many shows a random split of the groups' first members, one piece a hymn (fewer pieces,
    so fewer to share).
    """
    rng = np.random.default_rng(1)
    firsts, single = [group[:1] for group in groups], [[i] for i in range(len(melodies))]
    print("\nhow many n pitches in a row of the soprano, up to transposition, are in two splits")
    print(f"{'n':>3} {'this split':>11} {'one piece a group, at random':>29} {'all pieces, at random':>22}")
    for n in (8, 12, GRAM):
        # means of ten random splits
        one, every = [np.mean([shared(melodies, deal(some, rng), n) for _ in range(10)])
                      for some in (firsts, single)]
        print(f"{n:3} {shared(melodies, splits, n):11,} {one:29,.1f} {every:22,.1f}")
    if shared(melodies, splits, GRAM):
        fail(f"two splits share {GRAM} pitches of a melody: the groups are wrong")

# -----------------------------------------------------------------------------

def stream(pieces, transpositions):
    """Blocks of tokens: a separator, then every piece with one after it, in each transposition in turn."""
    yield [notes.SEPARATOR]
    for semitones in transpositions:
        for piece in pieces:
            yield notes.transpose(piece.tokens, semitones)
            yield [notes.SEPARATOR]

def main():
    pieces, says = read_once()
    print(says)
    # which piece goes where
    melodies = [melody(piece.tokens) for piece in pieces]
    groups = groups_of([piece.title for piece in pieces], melodies)
    splits = deal(groups, np.random.default_rng(split_seed))
    sizes = np.array([len(piece.tokens) for piece in pieces])
    print(f"{sizes.sum():,} tokens, {sizes.min():,} to {sizes.max():,} a piece; "
          f"{len(groups)} groups, the largest of {max(map(len, groups))} pieces")
    # the files
    blocks, names = {}, {}
    for split, indices in splits.items():
        chosen = [pieces[i] for i in sorted(indices)]
        blocks[split] = stream(chosen, TRANSPOSITIONS if split == 'train' else [0])
        names[split] = {'pieces': [f'{piece.number} {piece.title}'.strip() for piece in chosen]}
    meta = dict(kind='music', vocab_size=notes.VOCAB, dtype='uint8', note='chorales', splits=names)
    write_folder(name, blocks, meta)
    print('pieces: ' + ', '.join(f"{len(indices)} {split}" for split, indices in splits.items()))
    print('test pieces of at least T tokens: ' + ', '.join(
        f"{(sizes[splits['test']] >= T).sum()} (T = {T})" for T in (128, 256, 512, 768, 1024)))
    check(melodies, groups, splits)

if __name__ == '__main__':
    main()
