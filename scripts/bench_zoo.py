"""Swap the networks of MXNet's model zoo: agreement and times, layer by layer."""

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from ece408_op.cachedir import atomic_path
from ece408_op.lab import zoo


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "networks",
        nargs="*",
        metavar="NETWORK",
        help=f"of {', '.join(zoo.NETWORKS)} (default: all)",
    )
    parser.add_argument("--batch", type=int, default=1, help="images at once (default: 1)")
    parser.add_argument("--repeat", type=int, default=5, help="timed passes (default: 5)")
    parser.add_argument(
        "--write", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )
    options = parser.parse_args()
    unknown = set(options.networks) - zoo.NETWORKS.keys()
    if unknown:
        parser.error(f"unknown network {unknown.pop()!r}; there are: {', '.join(zoo.NETWORKS)}")
    names = tqdm(options.networks or list(zoo.NETWORKS), unit="network", disable=None)
    comparisons = [zoo.compare(name, options.batch, options.repeat) for name in names]
    print(zoo.table(comparisons))
    if options.write:
        document = zoo.document(comparisons)
        machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
        text = f"# Model zoo\n\n{document['date']}: {machine}\n\n{zoo.table(comparisons)}\n"
        for suffix, content in ((".md", text), (".json", json.dumps(document, indent=2) + "\n")):
            with atomic_path(options.write.with_suffix(suffix)) as temporary:
                temporary.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
