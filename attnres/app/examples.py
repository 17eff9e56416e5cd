"""Two texts to begin with, written for this page: Python source and prose."""

CODE = '''\
def mean_weight(rows, name):
    """Average weight of one source."""
    total, count = 0.0, 0
    for row in rows:
        if name not in row:
            continue
        total += row[name]
        count += 1
    return total / count if count else None


class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, step=1):
        self.value += step
        return self.value
'''

PROSE = """\
The ferry left the harbour an hour late. Nobody on the pier had expected anything else. An old man folded his \
newspaper, looked at the grey water, and said that in the winter of his childhood the whole bay had frozen, so that \
people walked to the island with lanterns. The children did not believe him. When the wind turned, the gulls rose \
from the roofs, and the ship, small and slow, began to cross the line where the river meets the sea.
"""

EXAMPLES = {"code": CODE, "prose": PROSE}
