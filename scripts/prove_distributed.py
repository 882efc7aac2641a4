"""One model trained by several processes: the same as one process trains, also after a worker, a
server and the scheduler were killed, on one machine and on two network namespaces."""

import argparse
import contextlib
import tempfile
from pathlib import Path

import numpy as np
from studies import distributed, options, results
from studies.distributed import Counts, Place

from ece408_op.cli import program
from ece408_op.files import markdown

VICTIMS = ("worker", "server", "scheduler")
HEAD = ["where", "run", "seconds", "exit code", "ended after, s", "none left after, s"]
HEAD += ["weights equal", "steps' losses", "epochs' losses", "accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4, help="default: 4")
    parser.add_argument("--servers", type=int, default=2, help="default: 2")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument("--batch-size", type=int, default=100, help="default: 100")
    parser.add_argument("--loopback-only", action="store_true", help="without namespaces")
    parser.add_argument("--sshd", help="OpenSSH's server (default: a stand-in for ssh)")
    options.add_output(parser)
    asked = parser.parse_args()
    counts = Counts(asked.workers, asked.servers, asked.epochs, asked.batch_size)
    with (
        tempfile.TemporaryDirectory(prefix="ece408-jobs-") as name,
        contextlib.ExitStack() as stack,
    ):
        places = [Place("one machine")]
        if not asked.loopback_only:
            places.append(stack.enter_context(distributed.two_machines(asked.sshd)))
        show(counts, asked.output, *measured(counts, places, Path(name)))


def measured(counts, places, folder):
    """Rows of the table, and records of the same."""
    alone = distributed.train(folder / "alone", counts, None)
    rows = [
        ["one process", "", f"{alone.seconds:.0f}", alone.code, "", "", "", "", "", alone.accuracy]
    ]
    records = [distributed.record(alone, where="one process", accuracy=alone.accuracy)]
    for number, place in enumerate(places):
        whole = distributed.train(folder / f"whole{number}", counts, place)
        add(rows, records, place, "whole", whole, alone, counts)
        robbed = folder / f"robbed{number}"
        for role in VICTIMS:
            harm = distributed.killing(role, counts.epochs - 1)
            run = distributed.train(robbed, counts, place, harm)
            add(rows, records, place, f"{role} killed", run, None, counts)
        if place.cut:
            cut = distributed.cutting(place, counts.epochs - 1)
            run = distributed.train(robbed, counts, place, cut)
            # For those that come after.
            distributed.join(place)
            add(rows, records, place, "machine 2 off the network", run, None, counts)
        resumed = distributed.train(robbed, counts, place)
        add(rows, records, place, "resumed", resumed, alone, counts)
    return rows, records


def add(rows, records, place, what, run, alone, counts):
    more = {"where": place.name, "run": what}
    after = "" if run.ended_after is None else f"{run.ended_after:.1f}"
    row = [place.name, what, f"{run.seconds:.0f}", run.code, after, f"{run.gone_after:.1f}"]
    if alone is None:
        row += [""] * 4
    else:
        # One that was resumed made the last steps only.
        own = alone.losses[-len(run.losses) :]
        by_step = np.abs(run.losses - own)
        steps = len(alone.losses) // counts.epochs
        by_epoch = np.abs((run.losses - own).reshape(-1, steps).mean(axis=1))
        row += ["yes" if run.are_equal else "NO"]
        row += [f"{by_step.max():.1e}", f"{by_epoch.max():.1e}", run.accuracy]
        more |= {"weights equal": run.are_equal, "accuracy": run.accuracy}
        more |= {"by step": float(by_step.max()), "by epoch": float(by_epoch.max())}
    rows.append(row)
    records.append(distributed.record(run, **more))


def show(counts, prefix, rows, records):
    said = (
        f"{counts.workers} workers, {counts.servers} servers and a scheduler train "
        f"{distributed.TERM} for {counts.epochs} epochs in batches of {counts.batch}. Losses: the "
        "largest differences from those of one process. A process is killed in the last epoch, "
        "in each of several runs in one folder, and then the job is resumed there. All share the "
        "cores of one machine: seconds say nothing of the speed of several."
    )
    told = [
        f"- {each['where']}, {each['run']}: `{each['said']}`" for each in records if "said" in each
    ]
    table = "\n\n".join([said, markdown.table(HEAD, rows), "\n".join(told)])
    content = {"counts": vars(counts), "runs": records}
    results.show(prefix, "Training by several processes", table, content)


if __name__ == "__main__":
    program.run("prove_distributed", main)
