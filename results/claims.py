"""
Fill the numbers of README.md and results/README.md in from the csvs beside this file.

    python results/claims.py                 # after new rows
    python results/claims.py --check=True    # change nothing; exit status 1 if a number is stale

A number stands between two comments: <!--linear:jordan_exact-rope@8L-->+0.171 ±0.025<!---->. The first says
the csv, the encoding (with _ for a space), perhaps what it is compared with, the length, and perhaps, after a
question mark, a word of the panel's name: <!--softmax:rope@8L?n_layer=2-->. A difference comes with n,
adjusted p and verdict. <!--size:model.py-->44<!----> is the size of a file in KB.
"""

import os
import re
import sys
from functools import cache

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
from configurator import ROOT, configure
import ablate
from common import fail

# -----------------------------------------------------------------------------
check = False # only say what is stale
# -----------------------------------------------------------------------------

MARK = re.compile(r'(<!--(\w+):([^@>]+?)(?:@(\d+)L)?(?:\?(\S+?))?-->)(.*?)(<!---->)', flags=re.S)

def named(encodings, name):
    """The rows of this encoding, or None."""
    return next((group for key, group in encodings.items() if key.replace(' ', '_') == name), None)

@cache
def compared(study, base):
    """The panels of a csv, p adjusted for all comparisons with this baseline. Many claims want the same."""
    panels = ablate.read(os.path.join(ROOT, 'results', f'{study}.csv'))
    known = {key.replace(' ', '_'): key for encodings in panels.values() for key in encodings}
    ablate.baseline = known.get(base, base)
    ablate.compare(panels)
    return panels

def text_of(study, names, length, panel):
    """What the csv of a study says: '0.982 ±0.009', or '+0.171 ±0.025 (n = 5, p < .001, better)'."""
    if study == 'size':
        return f'{os.path.getsize(os.path.join(ROOT, names)) / 1000:.0f}'

    name, _, base = names.partition('-')
    panels = compared(study, base or 'rope')

    # the one panel that has it
    found = [named(encodings, name) for key, encodings in panels.items() if not panel or panel in key.split()]
    found = [group for group in found if group]
    if len(found) != 1:
        raise LookupError(f"{len(found)} panels of results/{study}.csv have {name} {panel or ''}")
    cell = found[0].cells[int(length) * found[0].L]
    if not base:
        return ablate.plus_minus(cell)
    difference = cell['difference']
    p = ablate.small(difference['adjusted_p'])
    p = f'p {p}' if p.startswith('<') else f'p = {p}'
    return f"{ablate.plus_minus(difference, '+')} (n = {difference['n']}, {p}, {difference['verdict']})"

def main():
    stale = []
    for file in ('README.md', os.path.join('results', 'README.md')):
        path = os.path.join(ROOT, file)
        with open(path, encoding='utf-8') as f:
            before = f.read()

        def fill(match):
            start, study, names, length, panel, old, end = match.groups()
            try:
                new = text_of(study, names, length, panel)
            except (LookupError, OSError) as e:
                fail(f"{file}: {start}: {e}")
            if new != old:
                stale.append(f"{file}: {start} {old!r} is {new!r}")
            return start + new + end

        after = MARK.sub(fill, before)
        if after != before and not check:
            with open(path, 'w', encoding='utf-8') as f:
                f.write(after)
    if check and stale:
        fail(f"{len(stale)} numbers are stale; python results/claims.py fills them in: {stale[0]}")
    print(f"{len(stale)} numbers were stale" + (f": {'; '.join(stale)}" if stale else ''))

if __name__ == '__main__':
    configure(globals())
    main()
