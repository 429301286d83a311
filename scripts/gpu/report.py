"""The report: parts with what came of them, as Markdown."""

import datetime
import os
import re

PASSED, FAILED, SKIPPED = "passed", "FAILED", "SKIPPED"


class Part:
    """One part of the check: its outcome, why, and what it found, as Markdown."""

    def __init__(self, title, outcome=PASSED, why="", text="", seconds=0.0):
        self.title, self.outcome, self.why, self.text, self.seconds = title, outcome, why, text, seconds

    def fail(self, why):
        """The first failure is the one that is told."""
        if self.outcome != FAILED:
            self.outcome, self.why = FAILED, why


def cell(value):
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(head, rows):
    lines = ["| " + " | ".join(map(cell, head)) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def size(count):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def quoted(text):
    return "\n```\n" + text.replace("```", "'''") + "\n```\n" if text else ""


def file_name(gpu):
    """The report's name: that of the GPU, as a file may be called."""
    return (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu") + ".md"


def document(gpu, command, machine, versions, goals, parts, notes):
    today = datetime.date.today().isoformat()
    text = [f"# {gpu}", "", f"Made by `{command}` on {today}. [How and what](README.md).", ""]
    text += [f"**{note}**\n" for note in notes]
    text += [table(("machine", ""), machine), table(("version", ""), versions)]
    if goals:
        text += ["## Goals", "", table(("goal", "measured", ""), goals)]
    rows = [(part.title, part.outcome, f"{part.seconds:.0f} s", part.why) for part in parts]
    text += ["## Parts", "", table(("part", "", "time", "why"), rows)]
    for part in parts:
        if part.text:
            text += [f"## {part.title}", "", part.text.strip(), ""]
    return "\n".join(text)


def write(folder, name, text):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)
    return path
