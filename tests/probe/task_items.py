"""A few made-up items of benchmarks, in the files that `evaluation.task_data` names."""

import json
from pathlib import Path

ARC = [
    {
        "id": str(i),
        "question": f"Which number is {i}?",
        "choices": {"text": [str(i), "none of them", "a very long answer"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[i % 3],
    }
    for i in range(9)
]
HELLASWAG = [
    {"query": f"Someone counts to {i}", "endings": ["and stops.", "and runs away.", "x", "y"], "label": i % 4}
    for i in range(6)
]
LAMBADA = [{"text": f"A man counts to the number {i} and then he stops counting"} for i in range(12)]
WIKITEXT = [{"page": "A short page about numbers. It has two sentences."}, {"page": "Another page " * 60}]


def write_task_data(folder: Path) -> str:
    """Write the items into a folder and return its name."""
    files = {"arc_easy": ARC, "hellaswag_processed": HELLASWAG, "lambada_openai": LAMBADA, "wikitext": WIKITEXT}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)
