"""Random draws of a simulation: pure functions of what they are for, and a microsecond each.

Engines draw from Philox (``generators/draws.py``), which is made for long streams: a simulation wants one
or two numbers of each answer, a million times.
"""

from __future__ import annotations

from statistics import NormalDist

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STANDARD_NORMAL = NormalDist()


def _mixed(word: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014): a bijection of 64-bit words."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def uniform(*key: int) -> float:
    """A draw from (0, 1), the ends excluded, named by ``key``."""
    word = 0
    for part in key:
        word = _mixed((word + part + 1) * _GOLDEN & _WORD)
    return ((word >> 11) + 0.5) / (1 << 53)


def standard_normal(*key: int) -> float:
    """A draw from the standard normal distribution, named by ``key``."""
    return _STANDARD_NORMAL.inv_cdf(uniform(*key))
