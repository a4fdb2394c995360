"""RULER (Hsieh et al. 2024): generated tasks of any length, one file per category.

The tasks are reimplemented from the description in the paper (section 3, appendix B), with our own wording. Haystacks
and word lists are the rows of `ruler/` in `--data`, or by default the text that ships with the examples.
"""

from __future__ import annotations

from ..base import Task
from .aggregation import AGGREGATION
from .needles import NEEDLES
from .questions import QUESTIONS
from .tracking import TRACKING

RULER: tuple[Task, ...] = (*NEEDLES, *TRACKING, *AGGREGATION, *QUESTIONS)
