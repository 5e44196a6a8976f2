"""
walkthrough.ipynb: anybody can open it, its cells run as they are, and its sections keep their word.
Nothing here needs Jupyter: a notebook is JSON, and its cells are Python.
"""

import ast
import base64
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from conftest import ROOT
from model import Jordan
from tasks import KernelTask

PATH = os.path.join(ROOT, 'walkthrough.ipynb')
with open(PATH, encoding='utf-8') as f:
    NOTEBOOK = json.load(f)
CELLS = NOTEBOOK['cells']
CODE = [cell for cell in CELLS if cell['cell_type'] == 'code']
NUMERALS = ['i', 'ii', 'iii', 'iv', 'v', 'vi', 'vii', 'viii']

def source(cell):
    return ''.join(cell['source'])

def title(cell):
    """The numeral of the section that a cell begins, or None."""
    found = re.match(r'## \((\w+)\) ', source(cell))
    return found[1] if found and cell['cell_type'] == 'markdown' else None

def sections():
    """numeral -> its cells."""
    out, now = {}, None
    for cell in CELLS:
        now = title(cell) or now
        if now:
            out.setdefault(now, []).append(cell)
    return out

def images(cell):
    shown = [output.get('data', {}) for output in cell['outputs']]
    return [data['image/png'] for data in shown if 'image/png' in data]

def answers():
    """The code of the hidden answers."""
    hidden = re.findall(r'<details>.*?</details>', '\n'.join(map(source, sections()['viii'])), flags=re.S)
    return [code for text in hidden for code in re.findall(r'```python\n(.*?)```', text, flags=re.S)]

# -----------------------------------------------------------------------------

def test_it_is_a_notebook_of_format_4():
    assert NOTEBOOK['nbformat'] == 4
    assert NOTEBOOK['metadata']['kernelspec']['name'] == 'python3'
    names = [cell['id'] for cell in CELLS]
    assert len(set(names)) == len(names)
    for cell in CELLS:
        assert cell['cell_type'] in ('markdown', 'code')
        if cell['cell_type'] == 'code':
            compile(source(cell), cell['id'], 'exec')

def test_it_is_of_modest_size():
    assert os.path.getsize(PATH) < 1e6

def test_it_has_the_eight_sections_in_order():
    assert [title(cell) for cell in CELLS if title(cell)] == NUMERALS

@pytest.mark.parametrize('numeral', NUMERALS[:-1])
def test_each_section_ends_in_an_assert(numeral):
    last = [cell for cell in sections()[numeral] if cell['cell_type'] == 'code'][-1]
    assert isinstance(ast.parse(source(last)).body[-1], ast.Assert)

def test_it_was_run_from_top_to_bottom_without_an_error():
    assert [cell['execution_count'] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {output['output_type'] for cell in CODE for output in cell['outputs']}
    assert kinds <= {'stream', 'display_data'} # no error, and no value that a cell happens to end in
    assert not [cell['id'] for cell in CODE for output in cell['outputs'] if output.get('name') == 'stderr']

def test_each_cell_that_draws_or_prints_shows_what():
    for cell in CODE:
        draws = re.search(r'^(ax = panel|_, .* = plt.subplots)', source(cell), flags=re.M)
        assert len(images(cell)) == bool(draws), cell['id']
        if re.search(r'^( {4})?print', source(cell), flags=re.M):
            assert any(output['output_type'] == 'stream' for output in cell['outputs']), cell['id']

def test_figures_are_pictures():
    for cell in CODE:
        for image in images(cell):
            assert base64.b64decode(image).startswith(b'\x89PNG')

def test_it_names_no_path_of_a_machine():
    text = json.dumps(NOTEBOOK)
    for cell in CODE:
        for image in images(cell): # four letters may well stand in base64
            text = text.replace(json.dumps(image), '')
    for place in ('/tmp', '/work', '/root', '/home', '/Users', 'C:\\'):
        assert place not in text

def without_words(code):
    """Python without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(code))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(tree)

@pytest.mark.parametrize('name', ['Jordan.rotate', 'Jordan.score', 'Jordan.carry', 'KernelTask.rows'])
def test_the_functions_that_it_shows_are_those_of_the_repo(name):
    """Else execute the notebook again: its outputs show code that has changed since."""
    [cell] = [cell for cell in CODE if source(cell) == f'print(inspect.getsource({name}))']
    shown = ''.join(line for output in cell['outputs'] for line in output['text'])
    kind, _, method = name.partition('.')
    function = getattr({'Jordan': Jordan, 'KernelTask': KernelTask}[kind], method)
    assert without_words(shown) == without_words(inspect.getsource(function))

def test_cells_are_short():
    for cell in CODE:
        assert len(source(cell).splitlines()) <= 20, cell['id']
        assert max(map(len, source(cell).splitlines())) <= 100, cell['id']

def test_each_exercise_has_a_hidden_answer():
    exercises = [source(cell) for cell in sections()['viii'] if re.match(r'\*\*\d', source(cell))]
    assert len(exercises) >= 4
    for text in exercises:
        assert text.count('<details>') == text.count('</details>') == 1

# -----------------------------------------------------------------------------

@pytest.mark.slow
def test_its_cells_and_its_hidden_answers_run(tmp_path):
    """In an interpreter of their own, one after the other, in one namespace. Minutes."""
    blocks = [[cell['id'], source(cell)] for cell in CODE] + [['an answer', code] for code in answers()]
    assert len(blocks) > len(CODE)
    (tmp_path / 'cells.json').write_text(json.dumps(blocks), encoding='utf-8')
    run = ("import json, sys\n"
           "sys.path.insert(0, '')\n"
           "scope = {'__name__': '__main__'}\n"
           "for name, code in json.load(open(sys.argv[1], encoding='utf-8')):\n"
           "    print('---', name, flush=True)\n"
           "    exec(compile(code, name, 'exec'), scope)\n")
    env = os.environ | dict(MPLBACKEND='Agg', MPLCONFIGDIR=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', run, str(tmp_path / 'cells.json')], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
