"""The page docs/simulation/msccl.md."""

from prices import size_text


def text(seconds):
    return f"{seconds * 1e3:.1f} us" if seconds < 1 else f"{seconds:.2f} ms"


def claims(figures):
    lines = ["| figure | what | paper | simulated | reached |", "|---|---|---|---|---|"]
    for figure in figures:
        name = figure.title.split(":")[0]
        for what, paper, ours, reached in figure.claims:
            mark = {True: "yes", False: "**no**", None: "no figure"}[reached]
            lines.append(f"| {name} | {what} | {paper} | {ours} | {mark} |")
    return "\n".join(lines) + "\n"


def table(figure):
    names = list(figure.speedups)
    head = ["bytes", f"{figure.baseline}, time", *figure.notes, *names]
    lines = [f"## {figure.title}", "", f"Times as fast as {figure.baseline}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---:|---:|" + "---|" * len(figure.notes) + "---:|" * len(names)]
    for at, size in enumerate(figure.sizes):
        row = [size_text(size), text(figure.times[figure.baseline][at])]
        row += [str(column[at]) for column in figure.notes.values()]
        row += [f"{figure.speedups[name][at]:.2f}" for name in names]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def tables(figures):
    return claims(figures) + "\n" + "\n".join(table(figure) for figure in figures)


def page(figures):
    return tables(figures)
