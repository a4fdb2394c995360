"""Registry of tasks."""

from __future__ import annotations

from hf_tiered_cache.errors import suggest

from ..errors import EvalError
from .base import Draw, Example, Task
from .choices import CHOICES
from .conversations import CONVERSATIONS
from .longbench import LONGBENCH, LongBench
from .rag import RAG
from .reference import REFERENCE, REFERENCE_NEEDLES
from .retrieved import RETRIEVED
from .ruler import RULER
from .squad import SQUAD
from .text import TEXT

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *CHOICES,
        *LONGBENCH,
        *RULER,
        *RAG,
        *RETRIEVED,
        *CONVERSATIONS,
        *REFERENCE,
        *REFERENCE_NEEDLES,
        SQUAD,
        TEXT,
    )
}

GROUPS: dict[str, tuple[str, ...]] = {
    "fewshot": tuple(task.name for task in CHOICES),
    "longbench": tuple(task.name for task in LONGBENCH),
    "ruler": tuple(task.name for task in RULER),
    "rag": tuple(task.name for task in RAG),
    "retrieved": tuple(task.name for task in RETRIEVED),
    "conversations": tuple(task.name for task in CONVERSATIONS),
    "reference": tuple(task.name for task in REFERENCE),
    "reference_needles": tuple(task.name for task in REFERENCE_NEEDLES),
}
"""Task names of each group."""

__all__ = ["GROUPS", "TASKS", "Draw", "Example", "LongBench", "Task", "find_tasks"]


def find_tasks(names: str) -> list[Task]:
    """Return the tasks of a comma-separated list of names and groups, without duplicates.

    Raises:
        EvalError: A task is unknown, or the list is empty.
    """
    tasks: dict[str, Task] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        for task_name in GROUPS.get(name, (name,)):
            if task_name not in TASKS:
                advice = suggest(task_name, [*TASKS, *GROUPS], "`--list` shows all tasks and groups")
                raise EvalError(f"unknown task {task_name!r}{advice}")
            tasks[task_name] = TASKS[task_name]
    if not tasks:
        raise EvalError("name at least one task, as in --tasks sst2,rte")
    return list(tasks.values())
