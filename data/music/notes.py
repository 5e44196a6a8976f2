"""
Four-part music as tokens, and back: as notes, as lines of note names, as a MIDI file, as a picture.

Time is a grid of sixteenths. At each step there are four tokens, one per voice, soprano to bass. A token is

    SEPARATOR        between two pieces, never inside one
    REST             this voice is silent
    begin(p)         a note of pitch p begins; p is a MIDI number, 60 is C4
    held(p)          a note of pitch p that began at an earlier step still sounds

so the same pitch twice is told from one long note, and every token says what is heard. Reading scores and
writing MIDI need music21, the picture needs matplotlib; both are imported where they are used.
"""

import os

import numpy as np

from common import fail

VOICES = ('Soprano', 'Alto', 'Tenor', 'Bass')
STEPS = 4 # a quarter note; so a bar of 4/4 is 16 steps, 64 tokens
LOW, HIGH = 30, 88 # pitches. Chorales have 36 to 81; transpositions by -5 to +6 semitones need 31 to 87
SEPARATOR, REST = 0, 1
VOCAB = 2 + 2 * (HIGH - LOW)

def begin(pitch):
    return 2 + 2 * (pitch - LOW)

def held(pitch):
    return 3 + 2 * (pitch - LOW)

def pitch_of(token):
    """Works for arrays; means nothing for SEPARATOR and REST."""
    return (token - 2) // 2 + LOW

def begins(token):
    return (token >= 2) & (token % 2 == 0)

def transpose(tokens, semitones):
    """The tokens, so many semitones higher. Rests and separators stay."""
    tokens = np.asarray(tokens, dtype=int)
    moved = np.where(tokens >= 2, tokens + 2 * semitones, tokens)
    sounding = moved[tokens >= 2]
    if len(sounding) and not (sounding.min() >= 2 and sounding.max() < VOCAB):
        raise ValueError(f'transposed by {semitones}, the music leaves the pitches {LOW} to {HIGH - 1}')
    return moved

# -----------------------------------------------------------------------------
# notes <-> tokens. A note is (first step, number of steps, pitch)

def tokens_of(voices):
    """Four lists of notes -> tokens (4 n,), n the end of the last note. A voice without a note is silent."""
    n = max((start + length for notes in voices for start, length, _ in notes), default=0)
    grid = np.full((n, len(VOICES)), REST)
    for v, notes in enumerate(voices):
        for start, length, pitch in notes:
            if not LOW <= pitch < HIGH:
                raise ValueError(f'pitch {pitch} lies outside {LOW} to {HIGH - 1}')
            grid[start, v] = begin(pitch)
            grid[start + 1:start + length, v] = held(pitch)
    return grid.reshape(-1)

def notes_of(tokens):
    """
    Tokens of one piece -> four lists of notes. What a model writes may break the rules, and is still read:
    a pitch that is held without having begun begins there; a separator ends the piece; an unfinished last
    step is left out.
    """
    tokens = np.asarray(tokens)
    stop = np.flatnonzero(tokens == SEPARATOR)
    tokens = tokens[:stop[0]] if len(stop) else tokens
    grid = tokens[:len(tokens) // len(VOICES) * len(VOICES)].reshape(-1, len(VOICES))
    voices = []
    for line in grid.T:
        notes = []
        for step, token in enumerate(line):
            if token == REST:
                continue
            pitch = int(pitch_of(token))
            # goes on: the voice's last note ends here and has this pitch
            if not begins(token) and notes and notes[-1][2] == pitch and sum(notes[-1][:2]) == step:
                notes[-1] = (notes[-1][0], notes[-1][1] + 1, pitch)
            else:
                notes.append((step, 1, pitch))
        voices.append(notes)
    return voices

def read_score(score):
    """
    A music21 score of four parts -> (four lists of notes, number of notes whose ends the grid cannot hold).
    Ends are rounded to the nearest step; a note that is left with no step, as grace notes are, is dropped.
    Tied notes become one. Repeats are not played. The upper note of a chord counts.
    """
    voices, rounded = [], 0
    for part in score.parts:
        notes = []
        for note in part.flatten().notes:
            # in steps, as fractions: a triplet is no float
            exact = [note.offset * STEPS, (note.offset + note.duration.quarterLength) * STEPS]
            start, stop = (int(x + 1 / 2) for x in exact)
            rounded += [start, stop] != exact or start == stop
            pitch = max(p.midi for p in note.pitches)
            goes_on = note.tie is not None and note.tie.type in ('continue', 'stop')
            if goes_on and notes and notes[-1][2] == pitch and sum(notes[-1][:2]) == start:
                notes[-1] = (notes[-1][0], stop - notes[-1][0], pitch)
            elif stop > start:
                notes.append((start, stop - start, pitch))
        voices.append(notes)
    return voices, rounded

# -----------------------------------------------------------------------------
# for people

def name_of(pitch):
    """60 -> C4. A token knows no key, so black keys are sharps."""
    return 'C C# D D# E F F# G G# A A# B'.split()[pitch % 12] + str(pitch // 12 - 1)

def lines(tokens, columns=16):
    """
    Four lines of note names under the time in quarter notes, with a column for every step at which some
    voice begins a note or falls silent: '-' is held, '.' is silent. Broken into blocks of so many columns.
    """
    voices = notes_of(tokens)
    times = sorted({t for notes in voices for start, length, _ in notes for t in (start, start + length)})
    if not times:
        return '(no notes)'
    table = [['quarter', *(f'{t / STEPS:g}' for t in times[:-1])]]
    for voice, notes in zip(VOICES, voices):
        cells = dict.fromkeys(times[:-1], '.')
        for start, length, pitch in notes:
            for t in times:
                if start <= t < start + length:
                    cells[t] = name_of(pitch) if t == start else '-'
        table.append([voice, *cells.values()])
    blocks = []
    for a in range(1, len(times), columns):
        rows = [f'{row[0]:8}' + ''.join(f'{cell:6}' for cell in row[a:a + columns]) for row in table]
        blocks.append('\n'.join(row.rstrip() for row in rows))
    return '\n\n'.join(blocks)

def write_midi(tokens, path, tempo=80):
    """A standard MIDI file with a track per voice, `tempo` quarter notes a minute. Needs music21."""
    from music21 import instrument, note, stream
    from music21 import tempo as marks
    score = stream.Score()
    for voice, notes in zip(VOICES, notes_of(tokens)):
        part = stream.Part(id=voice)
        part.insert(0, getattr(instrument, voice)())
        part.insert(0, marks.MetronomeMark(number=tempo))
        for start, length, pitch in notes:
            part.insert(start / STEPS, note.Note(pitch, quarterLength=length / STEPS))
        score.insert(0, part)
    score.write('midi', fp=os.fspath(path))

def draw_roll(pieces, path, mark=0):
    """
    A piano roll of each (title, tokens), one below the other: time to the right, pitch upwards, a colour per
    voice. A line after `mark` steps says where the prompt ends. Needs matplotlib.
    """
    from matplotlib.figure import Figure
    colours = ('#d62728', '#e69f00', '#009e73', '#0072b2')
    fig = Figure(figsize=(10, 2.6 * len(pieces)), layout='tight')
    axes = fig.subplots(len(pieces), sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, (title, tokens) in zip(axes, pieces):
        for voice, notes, colour in zip(VOICES, notes_of(tokens), colours):
            for start, length, pitch in notes:
                # a gap of a tenth of a step, so that a pitch that is struck twice is two bars
                ax.broken_barh([(start / STEPS, (length - .1) / STEPS)], (pitch - .4, .8), color=colour)
            ax.plot([], [], color=colour, linewidth=5, label=voice.lower())
        if mark:
            ax.axvline(mark / STEPS, color='black', linewidth=1, linestyle='--')
        ax.set_title(title, loc='left', fontsize=10)
        ax.set_yticks(range(36, 85, 12), [name_of(pitch) for pitch in range(36, 85, 12)])
        ax.grid(axis='y', linewidth=.4)
    axes[0].legend(loc='lower right', bbox_to_anchor=(1, 1), ncol=4, fontsize=8, frameon=False)
    axes[-1].set_xlabel('quarter notes' + ('; the prompt ends at the dashed line' if mark else ''))
    fig.savefig(path, dpi=110)

def show(tokens, path, original=(), prompt=0):
    """
    Print the music; write path.mid, and path.png if there is an original to see beside it, whose first
    `prompt` tokens both have. What needs a package that is not installed is left out, and said.
    """
    print(lines(tokens))
    try:
        write_midi(tokens, path + '.mid')
        print(f"written: {path}.mid")
    except ImportError:
        print("no MIDI file, which needs music21: pip install music21")
    except OSError as e:
        fail(f"{path}.mid cannot be written ({e.strerror})")
    if not len(original):
        return
    try:
        pieces = ('the model', tokens), ('the original', original[:len(tokens)])
        draw_roll(pieces, path + '.png', prompt // len(VOICES))
        print(f"written: {path}.png")
    except ImportError:
        print("no picture, which needs matplotlib: pip install matplotlib")
    except OSError as e:
        fail(f"{path}.png cannot be written ({e.strerror})")
