"""Run every CUDA kernel on small problems under compute-sanitizer's four tools."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from studies import options as shared

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import results
from ece408_op.cli import arguments, program
from ece408_op.files import markdown
from ece408_op.lab import sanitizer

CHECK = Path(__file__).with_name("check_cuda.py")


def run_tool(tool, path, kernels, random):
    """Return the tool's summary, whether the results were right, and the whole output."""
    command = [path, "--tool", tool, sys.executable, str(CHECK), *kernels]
    command += ["--small", "--bare", "--random", str(random)]
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    summaries = re.findall(r"^=+ (.*SUMMARY: .*)$", output, re.M)
    return {
        "tool": tool,
        "summary": summaries[-1] if summaries else "no summary",
        "clean": bool(summaries) and bool(re.search(r"SUMMARY: 0 (errors|hazards)", summaries[-1])),
        "results_right": result.returncode == 0,
        "output": output,
    }


def _shown(ran):
    """Return the tool's first finding, or the end of the program's own output."""
    if ran["clean"]:
        return ran["output"][-4000:]
    found = [line for line in ran["output"].splitlines() if line.startswith("=")]
    return "\n".join(found[:60])


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="(default: all)")
    parser.option("--random N", "random problems for each kernel (default: 6)", default=6)
    parser.option("--tools TOOL,TOOL", "(default: all four)", default=",".join(sanitizer.TOOLS))
    shared.add_output(parser)
    options = parser.parse_args()
    kernels = options.kernels or [kernel.name for kernel in catalog.KERNELS]
    path, tools = sanitizer.find(), options.tools.split(",")
    with ThreadPoolExecutor(len(tools)) as pool:
        ran = list(pool.map(lambda tool: run_tool(tool, path, kernels, options.random), tools))
    rows = [
        [
            *(each["tool"], each["summary"]),
            "right" if each["results_right"] else "wrong, or the program failed",
        ]
        for each in ran
    ]
    table = (
        f"{len(kernels)} kernels, {options.random} random problems each: {', '.join(kernels)}.\n\n"
        + markdown.table(["tool", "what it says", "results"], rows)
    )
    kept = [{key: each[key] for key in each if key != "output"} for each in ran]
    content = {"kernels": kernels, "random": options.random, "tools": kept}
    results.show(options.output, "CUDA kernels under compute-sanitizer", table, content)
    bad = [each for each in ran if not (each["clean"] and each["results_right"])]
    for each in bad:
        print(f"\n{each['tool']}:\n{_shown(each)}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    program.run("sanitize_cuda", main)
