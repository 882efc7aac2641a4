"""Networks of many kinds by `to_gpu` in the emulator, each beside MXNet on the CPU.

Those of GluonCV and GluonNLP need `pip install gluoncv==0.10.5 gluonnlp==0.10.0`.
"""

import argparse
import importlib.util
import json
import sys

from studies import (  # noqa: F401
    emulated_networks,
    networks_gluon,
    networks_sequences,
    networks_symbols,
    options,
    results,
)
from tqdm import tqdm

from ece408_op.cli import program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    options.add_networks(parser, emulated_networks.CASES)
    parser.add_argument("--list", action="store_true", help="print names and kinds, run nothing")
    parser.add_argument(
        "--resume", action="store_true", help="leave out those that PREFIX.json has as right"
    )
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds for each network (default: 300)"
    )
    parser.add_argument("--examine", metavar="NETWORK", help=argparse.SUPPRESS)
    options.add_output(parser)
    asked = parser.parse_args()
    if asked.examine:
        print(json.dumps(emulated_networks.examine(asked.examine)))
    elif asked.list:
        for name, case in emulated_networks.CASES.items():
            print(f"{name}: {case.kind}")
    else:
        prove(asked)


def prove(asked):
    rows = earlier(asked.output)
    for name in tqdm(runnable(asked.networks), unit="network", disable=None):
        if not (asked.resume and rows.get(name, {}).get("right")):
            rows[name] = row = emulated_networks.run(__file__, name, asked.limit)
            print(f"{name}: {row.get('failure') or row['error']}", file=sys.stderr)
            show(asked.output, rows)
    print(emulated_networks.table(list(rows.values())))


def runnable(names):
    """Those whose packages are there; stderr says what to install for the others."""
    needs = {emulated_networks.CASES[name].needs for name in names} - {None}
    missing = sorted(each for each in needs if importlib.util.find_spec(each) is None)
    if missing:
        print(
            f"prove_networks: without the networks of {' and '.join(missing)}; to have them, "
            "pip install gluoncv==0.10.5 gluonnlp==0.10.0",
            file=sys.stderr,
        )
    return [name for name in names if emulated_networks.CASES[name].needs not in missing]


def earlier(prefix):
    """Rows of the file that is there already, by name."""
    path = prefix and prefix.with_name(prefix.name + ".json")
    rows = json.loads(path.read_text())["networks"] if path and path.exists() else []
    return {row["name"]: row for row in rows if row["name"] in emulated_networks.CASES}


def show(prefix, rows):
    """Write what there is so far, in the order of the list."""
    if prefix is not None:
        ordered = [rows[name] for name in emulated_networks.CASES if name in rows]
        title = "Deployed networks in the emulator"
        results.write(prefix, title, emulated_networks.table(ordered), {"networks": ordered})


if __name__ == "__main__":
    program.run("prove_networks", main)
