"""RULER (Hsieh et al. 2024): generated tasks of any length, each a file of this folder.

Made anew from the paper's description (section 3, appendix B), in words of ours. Haystacks and word lists are
the rows of `ruler/` in `--data`, or what ships with the examples.
"""

from __future__ import annotations

from ..base import Task
from .aggregation import AGGREGATION
from .needles import NEEDLES
from .questions import QUESTIONS
from .tracking import TRACKING

RULER: tuple[Task, ...] = (*NEEDLES, *TRACKING, *AGGREGATION, *QUESTIONS)
